"""What commands do where daemons and supervisor are of another wcache than they are."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cli.node import Node, wait_for
from tests.cli.snapshot import environment
from wcache.protocol.control import Control, RefusedError
from wcache.protocol.messages import AskReport, Message, Report
from wcache.protocol.name import keeper
from wcache.ranks import ask

pytestmark = [pytest.mark.cli, pytest.mark.process]

_EARLIER = """
import sys, wcache
{change}
from wcache.supervise.__main__ import main
from wcache.supervise.direct.timing import Timing
# On a busy machine it takes the first command long to come.
sys.exit(main(sys.argv[1:], timing=Timing(idle_s=60)))
"""
SAYS = "wcache.__version__ = '0.0.9'"
# As from before supervisors said it.
SAYS_NOTHING = """
from wcache.supervise.direct import messages, parent
class Reports(messages.Message, tag="reports", frozen=True, kw_only=True):
    units: tuple[dict, ...]
    def __post_init__(self):
        import msgspec
        said = tuple(msgspec.to_builtins(unit) for unit in self.units)
        for unit in said:
            del unit["supervisor_version"]
        msgspec.structs.force_setattr(self, "units", said)
parent.Reports = Reports
"""


@contextlib.contextmanager
def earlier_supervisor(node: Node, change: str, *arguments: str) -> Iterator[int]:
    """One of another wcache; its pid."""
    script = node.root / "earlier.py"
    script.write_text(_EARLIER.format(change=change))
    reader, writer = os.pipe()
    with (node.root / "earlier.log").open("wb") as log:
        made = subprocess.Popen(
            [sys.executable, str(script), "--empty", "--ready-fd", str(writer), *arguments],
            env=environment(node.places), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            pass_fds=(writer,),
        )  # fmt: skip
    os.close(writer)
    with os.fdopen(reader, "rb") as ready:
        assert ready.read(1), (node.root / "earlier.log").read_text()
    pid = keeper(node.paths)
    assert pid
    try:
        yield pid
    finally:
        # One that was detached has left its launcher, and is ended by the node's own means.
        if made.pid == pid:
            node("down", "--force")
            made.send_signal(signal.SIGTERM)
        made.wait(30)


@pytest.mark.parametrize(("change", "version"), [(SAYS, "0.0.9"), (SAYS_NOTHING, "")])
def test_a_restart_replaces_an_earlier_supervisor_and_keeps_the_weights(
    node: Node, change: str, version: str
) -> None:
    with earlier_supervisor(node, change, "--detach") as before:
        assert node.up("--tp", "3").code == 0
        served = [node.report(rank).serving for rank in (0, 1, 2)]
        told = node("doctor").stdout
        runs = f"runs wcache {version}" if version else "is of an earlier wcache"
        assert f"wcache's own (pid {before}) {runs}, installed is" in told
        done = node("restart", "0")
        assert done.code == 0, done.stderr
        of = f"of wcache {version}" if version else "of an earlier wcache"
        assert f"the supervisor was {of}, and is replaced" in done.stderr
        assert keeper(node.paths) not in (None, before)
        assert "wcache's own" not in node("doctor").stdout
        # The new one keeps what the old one kept, of ranks that were not restarted as well.
        for rank in (0, 1, 2):
            _kill_daemon(node, rank)
            now, was = node.report(rank).serving, served[rank]
            assert now
            assert was
            assert (now.how, now.manifest_digest) == ("adopted", was.manifest_digest)
        again = node("restart")
        assert again.code == 0
        assert "the supervisor" not in again.stderr


def _kill_daemon(node: Node, rank: int) -> None:
    pid = node.report(rank).pid
    os.kill(pid, signal.SIGKILL)

    def is_back() -> bool:
        found = ask(node.paths.rank(rank))
        return found is not None and found.pid != pid

    wait_for(is_back, "another daemon answers")


def test_a_supervisor_in_the_foreground_is_left_as_it_is_and_that_is_said(node: Node) -> None:
    with earlier_supervisor(node, SAYS) as before:
        assert node.up().code == 0
        daemon = node.report().pid
        told = node("doctor").stdout
        assert "runs wcache 0.0.9" in told
        assert "replace the container, or restart the unit" in told
        done = node("restart")
        assert done.code == 0
        assert "the supervisor is of wcache 0.0.9, and stays: it runs in the foreground" in (
            done.stderr
        )
        assert keeper(node.paths) == before
        assert node.report().pid != daemon


def test_a_supervisor_is_not_replaced_while_a_daemon_can_not_hand_over_its_weights(
    node: Node,
) -> None:
    with earlier_supervisor(node, SAYS, "--detach") as before:
        assert node.up("--tp", "3").code == 0
        stopped = node.report(1).pid
        os.kill(stopped, signal.SIGSTOP)
        try:
            done = node("restart", "0")
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert done.code == 0, done.stderr
        assert "of wcache 0.0.9, and stays: rank 1 does not answer" in done.stderr
        assert keeper(node.paths) == before


class Foresee(Message, tag="foresee", frozen=True, kw_only=True):
    """A message of a later wcache."""


def test_a_message_that_a_daemon_does_not_know_ends_with_what_to_do(node: Node) -> None:
    assert node.up().code == 0
    pid = node.report().pid
    with Control.connect(node.paths.rank(0), "operator") as control:
        with pytest.raises(RefusedError) as caught:
            control.request(Foresee(), Report)  # type: ignore[arg-type]  # no request, which is the point
    assert caught.value.message == (
        "the daemon of rank 0 is of another wcache, and does not know what it was asked for:"
        " foresee"
    )
    assert caught.value.hint.startswith("wcache restart has it run the installed one")
    assert caught.value.refusal.reason == "bad_request"
    with Control.connect(node.paths.rank(0), "operator") as control:
        assert control.request(AskReport(), Report).pid == pid
