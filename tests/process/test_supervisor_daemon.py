"""Real daemons under the real supervisor: the weights outlive either of them."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.places import Places, publish_config
from tests.processes import wait_for
from tests.publishing import publish
from wcache.errors import TryAgainError, WcacheError
from wcache.protocol.control import Control
from wcache.protocol.messages import AskReport, Attach, Attached, Report, StoreAgain, Stored
from wcache.supervise.direct.client import DirectSupervisor

pytestmark = pytest.mark.process

WEIGHTS = [b"\x01" * (2 << 20), b"\x02" * (2 << 20)]


@pytest.fixture
def commands(places: Places, monkeypatch: pytest.MonkeyPatch) -> Iterator[DirectSupervisor]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent.parent))
    places.write_config(publish_config())
    made = DirectSupervisor("")
    yield made
    made.shutdown()


def report(places: Places) -> Report | None:
    try:
        with Control.connect(places.rank(), "operator") as control:
            return control.request(AskReport(), Report)
    except WcacheError:
        return None


def serves(places: Places, pid: int) -> bool:
    """True when the daemon ``pid`` serves a generation."""
    said = report(places)
    return said is not None and said.pid == pid and said.serving is not None


def held(places: Places) -> list[tuple[int, bytes]]:
    """Inode and content of each slab, as an engine gets them."""
    with Control.connect(places.rank(), "client") as control:
        answer = control.request(Attach(), Attached)
        _, *slabs = control.channel.take_fds(1 + len(answer.slabs))
        try:
            return [(os.fstat(fd).st_ino, os.pread(fd, 16, 0)) for fd in slabs]
        finally:
            for fd in slabs:
                os.close(fd)


def begin(places: Places, commands: DirectSupervisor) -> list[tuple[int, bytes]]:
    """Starts the rank and publishes weights; returns what is held."""
    commands.start([0])
    wait_for(lambda: commands.show([0])[0].state == "active", "the daemon is ready")
    publish(places.rank(), WEIGHTS)
    return held(places)


def wait_active(commands: DirectSupervisor, places: Places, *, not_pid: int) -> int:
    """Waits for another daemon that serves; returns its pid."""

    def ready() -> bool:
        unit = commands.show([0])[0]
        other = unit.main_pid not in (0, not_pid)
        return other and unit.state == "active" and serves(places, unit.main_pid)

    wait_for(ready, "another daemon serves")
    return commands.show([0])[0].main_pid


def test_weights_outlive_the_daemon_and_then_the_supervisor(
    places: Places, commands: DirectSupervisor
) -> None:
    weights = begin(places, commands)
    first = commands.show([0])[0]
    said = report(places)
    assert said is not None
    assert first.stored_fds == said.expected_fds > len(WEIGHTS)

    os.kill(first.main_pid, signal.SIGKILL)
    second = wait_active(commands, places, not_pid=first.main_pid)
    assert held(places) == weights

    parent = _parent_of(second)
    os.kill(parent, signal.SIGKILL)
    wait_for(lambda: commands.show([0])[0].main_pid == 0, "the supervisor is gone")
    assert held(places) == weights
    commands.start([0])

    def taken_over() -> bool:
        unit = commands.show([0])[0]
        return unit.state == "active" and unit.stored_fds == first.stored_fds

    wait_for(taken_over, "everything is stored again")
    assert commands.show([0])[0].main_pid == second

    os.kill(second, signal.SIGKILL)
    third = wait_active(commands, places, not_pid=second)
    assert held(places) == weights
    commands.restart([0])
    wait_active(commands, places, not_pid=third)
    assert held(places) == weights


def test_a_daemon_that_lost_supervisor_and_files_is_found_and_no_second_one_begins(
    places: Places, commands: DirectSupervisor
) -> None:
    before = begin(places, commands)
    pid = commands.show([0])[0].main_pid
    os.kill(_parent_of(pid), signal.SIGKILL)
    wait_for(lambda: commands.show([0])[0].main_pid == 0, "the supervisor is gone")
    # It can not make its files again before it goes on.
    os.kill(pid, signal.SIGSTOP)
    places.remove_run()
    commands.start([])  # launches a supervisor
    with pytest.raises(TryAgainError, match=f"pid {pid}\\) has lost its socket"):
        commands.stop([0])
    commands.start([0])
    wait_for(lambda: commands.show([0])[0].restarts > 1, "it is looked for")
    os.kill(pid, signal.SIGCONT)

    def is_found() -> bool:
        unit = commands.show([0])[0]
        return unit.state == "active" and unit.stored_fds == len(WEIGHTS) + 2

    wait_for(is_found, "everything is stored again")
    assert commands.show([0])[0].main_pid == pid
    assert held(places) == before


def test_a_second_daemon_of_a_rank_ends(places: Places, commands: DirectSupervisor) -> None:
    begin(places, commands)
    places.rank().socket.unlink()
    command = [sys.executable, "-m", "wcache.daemon", "0"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == TryAgainError.exit_code
    assert f"another daemon (pid {commands.show([0])[0].main_pid}) keeps rank 0" in second.stderr


def test_a_run_folder_that_is_removed_is_made_again_and_nothing_is_lost(
    places: Places, commands: DirectSupervisor
) -> None:
    before = begin(places, commands)
    unit = commands.show([0])[0]
    with Control.connect(places.rank(), "client") as engine:
        engine.request(Attach(), Attached)
        places.remove_run()
        wait_for(lambda: serves(places, unit.main_pid), "the daemon listens again")
        wait_for(lambda: commands.show([0])[0].state == "active", "the supervisor listens again")
        rank = places.rank()
        for file in (rank.ready_file, rank.fingerprint_file, rank.served_file):
            wait_for(file.exists, f"{file.name} is there again")
        said = report(places)
        assert said is not None
        assert len(said.leases) == 1, "the engine's connection has ended"
    # A restart has the weights from the supervisor, so that has heard the daemon and its orders.
    commands.restart([0])
    wait_for(
        lambda: commands.show([0])[0].main_pid not in (0, unit.main_pid), "another daemon is up"
    )
    wait_for(lambda: serves(places, commands.show([0])[0].main_pid), "the weights are served")
    assert held(places) == before
    commands.stop([0])
    assert report(places) is None


def test_a_ready_file_that_is_removed_alone_is_written_again(
    places: Places, commands: DirectSupervisor
) -> None:
    begin(places, commands)
    ready = places.rank().ready_file
    wait_for(ready.exists, "the rank is ready")
    ready.unlink()  # also at once, before the daemon has seen that it was there
    wait_for(ready.exists, "it is there again")


def test_a_ready_file_that_could_not_be_written_is_a_problem_until_it_is(
    places: Places, commands: DirectSupervisor
) -> None:
    begin(places, commands)
    ready, pid = places.rank().ready_file, commands.show([0])[0].main_pid
    wait_for(ready.exists, "the rank is ready")
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    # As on a full disk; a supervisor that came back has both files written again.
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, limits[1]))
    ready.unlink()
    with Control.connect(places.rank(), "operator") as control:
        control.request(StoreAgain(), Stored)
    said = report(places)
    assert said is not None
    assert [problem.split(" can")[0] for problem in said.problems] == [str(ready)]
    assert not ready.exists()
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    wait_for(ready.exists, "it is there again")
    wait_for(lambda: (now := report(places)) is not None and not now.problems, "all is well")


def test_a_stop_frees_the_weights(places: Places, commands: DirectSupervisor) -> None:
    begin(places, commands)
    pid = commands.show([0])[0].main_pid
    commands.stop([0])
    unit = commands.show([0])[0]
    assert (unit.state, unit.stored_fds, unit.result) == ("inactive", 0, "")
    commands.start([0])
    wait_for(lambda: commands.show([0])[0].main_pid not in (0, pid), "another daemon")
    wait_for(lambda: (said := report(places)) is not None and said.serving is None, "it is empty")


def _parent_of(pid: int) -> int:
    # proc(5): the fourth field, after a name in parentheses.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
