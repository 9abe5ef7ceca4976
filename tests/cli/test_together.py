"""``up`` and ``restart`` over a changed configuration: all ranks switch, or none."""

import os
import signal
import subprocess
import sys

import msgspec
import pytest

from tests.cli.node import SMALL, Node, no_loader, other, parts, wait_for
from tests.cli.snapshot import environment
from wcache.config import load_config, save_config

pytestmark = [pytest.mark.cli, pytest.mark.process]

BOTH = (0, 1)


def contents(node: Node) -> list[str | None]:
    """What each of two ranks serves."""
    served = [node.report(rank).serving for rank in BOTH]
    return [one.fingerprint.content if one else None for one in served]


def loader_of(node: Node, rank: int) -> int:
    """The pid of the loader that is at work for a rank, which may be about to begin."""
    wait_for(lambda: node.report(rank).progress is not None, f"rank {rank} loads")
    progress = node.report(rank).progress
    assert progress is not None
    return progress.loader_pid


def change_dtype(node: Node) -> None:
    """As an editor does it."""
    was = load_config(node.paths.config_file)
    model = msgspec.structs.replace(was.model, dtype="float32")
    save_config(msgspec.structs.replace(was, model=model), node.paths.config_file)


def dtypes(node: Node) -> list[str | None]:
    served = [node.report(rank).serving for rank in BOTH]
    return [one.fingerprint.dtype if one else None for one in served]


def test_up_switches_no_rank_when_one_can_not_load(node: Node) -> None:
    assert node.up("--dp", "2").code == 0
    before, model = contents(node), other(node)
    with no_loader(node, 1):
        done = node("up", "--model", model, *SMALL, "--dp", "2")
    assert done.code == 1
    assert "error: rank 1: the loader failed" in done.stderr
    assert "ranks that served other weights serve them on" in done.stderr
    assert contents(node) == before
    assert [parts(node, rank) for rank in BOTH] == [{1: "serving"}, {1: "serving"}]
    again = node("up")
    assert again.code == 0, again.stderr
    first, second = contents(node)
    assert first == second != before[0]
    assert node("status").code == 0
    assert node("verify").code == 0


def test_restart_switches_no_rank_when_one_can_not_load(node: Node) -> None:
    assert node.up("--dp", "2").code == 0
    change_dtype(node)
    with no_loader(node, 1):
        done = node("restart", "--yes")
    assert done.code == 1
    assert "error: rank 1: the loader failed" in done.stderr
    assert "every rank serves the old weights" in done.stderr
    assert dtypes(node) == ["auto", "auto"]
    # Right after a restart nothing is freed yet: engines may still renew their leases.
    assert parts(node) in ({1: "serving"}, {1: "serving", 2: "draining"})
    assert not node.paths.previous_file.exists()
    again = node("restart", "--yes")
    assert again.code == 0, again.stderr
    assert "ranks 0, 1 serve the new weights" in again.stderr
    assert dtypes(node) == ["float32", "float32"]
    assert load_config(node.paths.previous_file).model.dtype == "auto"


def test_one_rank_alone_is_not_restarted_into_other_weights(node: Node) -> None:
    assert node.up("--dp", "2").code == 0
    change_dtype(node)
    before = node.report().pid
    done = node("restart", "0", "--yes")
    assert done.code == 1
    assert "rank 1 would go on with other weights than rank 0" in done.stderr
    assert node.report().pid == before
    assert dtypes(node) == ["auto", "auto"]


def test_an_up_that_was_given_up_is_gone_on_with_by_the_next(node: Node) -> None:
    """What it has loaded is neither served before all ranks have it, nor loaded again."""
    assert node.up("--dp", "2").code == 0
    before, model = contents(node), other(node)
    command = [sys.executable, "-m", "wcache", "up", "--model", model, *SMALL, "--dp", "2"]
    with no_loader(node, 1):
        with subprocess.Popen(
            command, env=environment(node.places), cwd=node.root, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as up:  # fmt: skip
            try:
                wait_for(lambda: node.report(0).progress is not None, "rank 0 loads")
                up.send_signal(signal.SIGSTOP)  # it would see that rank 1 has failed
                wait_for(lambda: node.report(0).staged is not None, "rank 0 has loaded")
                os.kill(up.pid, signal.SIGKILL)
                up.communicate()
            finally:
                up.kill()
    assert contents(node) == before
    staged = node.report(0).staged
    status = node("status")
    assert "generation 2 is loaded and not served: " in status.stdout
    again = node("up")
    assert again.code == 0, again.stderr
    first, second = contents(node)
    assert first == second != before[0]
    now = node.report(0).serving
    assert now is not None
    assert staged is not None
    assert now.number == staged.number == 2
    assert [parts(node, rank) for rank in BOTH] == [{2: "serving"}, {2: "serving"}]


def test_an_interrupted_up_says_what_goes_on(node: Node) -> None:
    assert node.up().code == 0
    command = [sys.executable, "-m", "wcache", "up", "--model", other(node), *SMALL]
    with subprocess.Popen(
        command, env=environment(node.places), cwd=node.root, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as up:  # fmt: skip
        try:
            wait_for(lambda: node.report().progress is not None, "the load is under way")
            up.send_signal(signal.SIGINT)
            _, said = up.communicate(timeout=30)
        finally:
            up.kill()
    assert up.returncode == 130
    assert "loading goes on, and nothing is switched: wcache up again goes on with it" in said
    wait_for(lambda: node.report().staged is not None, "the load has ended")
    assert parts(node) == {1: "serving", 2: "staged"}
    assert node("up").code == 0
    assert parts(node) == {2: "serving"}


def test_an_up_can_be_given_up_while_it_loads(node: Node) -> None:
    """No rank comes to serve the new weights by itself, and a reboot does not load them."""
    assert node.up("--dp", "2").code == 0
    before, config = contents(node), load_config(node.paths.config_file)
    command = [
        sys.executable, "-m", "wcache", "up", "--model", other(node), *SMALL, "--dp", "2",
    ]  # fmt: skip
    stopped = []
    with subprocess.Popen(
        command, env=environment(node.places), cwd=node.root, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as up:  # fmt: skip
        try:
            for rank in BOTH:
                stopped.append(loader_of(node, rank))
                os.kill(stopped[-1], signal.SIGSTOP)
            up.send_signal(signal.SIGINT)
            up.communicate(timeout=30)
            assert load_config(node.paths.config_file) != config
            dropped = node("rollback", "--drop")
        finally:
            up.kill()
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
    assert dropped.code == 0
    assert "ranks 0, 1: what is being loaded is given up, and will not be served" in dropped.stderr
    assert "the configuration went back to what is served" in dropped.stderr
    assert load_config(node.paths.config_file) == config
    wait_for(lambda: all(node.report(rank).progress is None for rank in BOTH), "loaders have ended")
    assert contents(node) == before
    assert [parts(node, rank) for rank in BOTH] == [{1: "serving"}, {1: "serving"}]
    assert node("status").code == 0
