"""Commands where weights are there, and their supervisor or the daemon's socket is not."""

import os
import signal

import pytest

from tests.cli.node import Node, wait_for
from wcache.config import load_config
from wcache.errors import WcacheError
from wcache.protocol.name import is_stopped, keeper
from wcache.rollout import together
from wcache.supervise.direct.client import DirectSupervisor

pytestmark = [pytest.mark.cli, pytest.mark.process]


def kill_supervisor(node: Node) -> None:
    pid = keeper(node.paths)
    assert pid
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: keeper(node.paths) is None, "the supervisor has ended")


def test_nothing_is_switched_without_a_supervisor_and_that_is_said(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert node.up().code == 0
    for variable, value in node.places.environment.items():
        monkeypatch.setenv(variable, value)
    config = load_config(node.paths.config_file)
    supervisor = DirectSupervisor("")
    assert together.loaded(node.paths, supervisor, [0], config) == {0: 1}
    kill_supervisor(node)
    with pytest.raises(WcacheError, match="the supervisor of rank 0 has ended") as caught:
        together.loaded(node.paths, supervisor, [0], config)
    assert caught.value.hint.startswith("wcache up starts one that takes the rank over")
    seen = node("doctor")
    assert "the one of rank 0 has ended" in seen.stdout
    assert "keeps 0 of" not in seen.stdout
    assert node("up").code == 0
    assert together.loaded(node.paths, supervisor, [0], config) == {0: 1}


def test_down_frees_no_rank_that_can_not_be_asked_who_uses_it(node: Node) -> None:
    assert node.up().code == 0
    pid = node.report().pid
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: is_stopped(pid), "the daemon is stopped")
        # As for the second until it has noticed that its socket was removed.
        node.paths.rank(0).socket.unlink()
        done = node("down")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert done.code == 1
    assert "can not be asked who uses it: its daemon does not listen just now" in done.stderr
    wait_for(node.paths.rank(0).socket.exists, "it listens again")
    assert node("status").code == 0
    done = node("down")
    assert done.code == 0
    assert "rank 0 down" in done.stderr
    assert " 0 B" not in done.stderr


def test_a_forced_down_claims_no_figure_that_it_does_not_know(node: Node) -> None:
    assert node.up().code == 0
    pid = node.report().pid
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: is_stopped(pid), "the daemon is stopped")
    node.paths.rank(0).socket.unlink()
    # SIGKILL reaches one that is stopped.
    done = node("down", "--force")
    assert done.code == 0
    assert "rank 0 down; rank 0 could not be asked what was held" in done.stderr
    assert "freed" not in done.stderr
