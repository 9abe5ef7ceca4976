"""Daemons outlive their supervisor, and the next one takes them over with their weights."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.process.supervised import LAUNCH, SLABS, Supervised
from tests.processes import PATIENCE_S, wait_for
from wcache.errors import TryAgainError, WcacheError
from wcache.paths import InstancePaths

pytestmark = pytest.mark.process


def has_ended(pid: int) -> bool:
    """True also while it waits to be reaped by the process that it was left to."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return "State:\tZ" in status


def abandon(supervised: Supervised, *ranks: int, **orders: object) -> list[int]:
    """Starts ranks and kills their supervisor; returns the daemons' pids."""
    parent = supervised.launch("--empty")
    for rank in ranks:
        supervised.order(rank, control=True, **orders)
    supervised.commands.start(ranks)
    pids = [supervised.wait_active(rank).main_pid for rank in ranks]
    parent.kill()
    parent.wait(PATIENCE_S)
    assert all(unit.state == "inactive" for unit in supervised.commands.show(ranks).values())
    return pids


def test_a_daemon_survives_its_supervisor_and_is_taken_over_with_its_weights(
    supervised: Supervised,
) -> None:
    (pid,) = abandon(supervised, 0)
    supervised.launch("--empty")
    unit = supervised.wait_active()
    wait_for(lambda: supervised.show().stored_fds == len(SLABS), "everything is stored again")
    assert unit.main_pid == pid
    assert len(supervised.starts()) == 1
    supervised.kill()
    unit = supervised.wait_active(starts=2)
    assert supervised.starts()[1]["fds"] == SLABS
    assert unit.main_pid != pid
    assert unit.result == "unknown"


def test_a_start_of_one_rank_takes_the_others_over_too(supervised: Supervised) -> None:
    pids = abandon(supervised, 0, 1)
    # The command launches the supervisor by itself.
    supervised.commands.start([1])
    assert [supervised.wait_active(rank).main_pid for rank in (0, 1)] == pids
    assert [len(supervised.starts(rank)) for rank in (0, 1)] == [1, 1]
    supervised.commands.stop([0, 1])
    supervised.commands.shutdown()


def test_a_restart_right_after_a_takeover_waits_for_the_weights(supervised: Supervised) -> None:
    (pid,) = abandon(supervised, 0)
    supervised.commands.restart([0])
    unit = supervised.wait_active(starts=2)
    assert unit.main_pid != pid
    assert supervised.starts()[1]["fds"] == SLABS


def test_a_stop_reaches_a_daemon_that_lost_its_supervisor(supervised: Supervised) -> None:
    (pid,) = abandon(supervised, 0)
    supervised.commands.stop([0])
    assert has_ended(pid)


def test_shutdown_reaches_daemons_that_lost_their_supervisor(supervised: Supervised) -> None:
    pids = abandon(supervised, 0, 1)
    supervised.commands.shutdown()
    assert all(map(has_ended, pids))


def test_a_daemon_that_is_not_recorded_is_taken_over_too(supervised: Supervised) -> None:
    (pid,) = abandon(supervised, 0)
    record = InstancePaths.of("").supervisor_folder / "ranks.json"
    assert record.read_bytes() == b'{"ranks":[0]}\n'
    record.write_bytes(b'{"ranks": "all of them"')
    supervised.launch("--empty")
    assert "record of started ranks can not be read" in supervised.log()
    assert supervised.show().state == "inactive"
    supervised.commands.start([0])
    assert supervised.wait_active().main_pid == pid
    assert len(supervised.starts()) == 1


def test_a_daemon_that_ended_without_a_supervisor_is_shown_as_failed(
    supervised: Supervised,
) -> None:
    abandon(supervised, 0)
    supervised.kill()
    supervised.launch("--empty")
    unit = supervised.show()
    assert (unit.state, unit.result) == ("failed", "ended while no supervisor ran")
    supervised.up()
    assert supervised.starts()[1]["fds"] == {}


def test_a_daemon_that_does_not_hand_its_weights_over_is_not_restarted_by_command(
    supervised: Supervised,
) -> None:
    (pid,) = abandon(supervised, 0, refuses=True)
    supervised.launch("--empty")
    unit = supervised.wait_active()
    assert (unit.main_pid, unit.stored_fds) == (pid, 0)
    with pytest.raises(WcacheError, match="rank 0 is not restarted, its descriptors are not"):
        supervised.commands.restart([0])
    assert supervised.show().main_pid == pid
    supervised.commands.stop([0])


def test_a_daemon_that_does_not_answer_is_kept_as_it_is(supervised: Supervised) -> None:
    supervised.timing(takeover_timeout_s=0.3)
    (pid,) = abandon(supervised, 0)
    os.kill(pid, signal.SIGSTOP)
    supervised.launch("--empty")
    unit = supervised.wait_state("active")
    assert (unit.main_pid, unit.stored_fds) == (pid, 0)
    os.kill(pid, signal.SIGCONT)
    # Asked anew by the restart it answers, and so nothing is lost.
    supervised.commands.restart([0])
    supervised.wait_active(starts=2)
    assert supervised.starts()[1]["fds"] == SLABS


def test_a_second_supervisor_refuses(supervised: Supervised) -> None:
    first = supervised.launch("--empty")
    second = subprocess.run(
        [*LAUNCH, "--empty"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert second.returncode == TryAgainError.exit_code
    words = f"another supervisor (pid {first.pid}) keeps the default instance"
    assert words in second.stderr
    assert "Traceback" not in second.stderr
    supervised.up()
