"""The supervisor without systemd: what it keeps, when it restarts, how it ends."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.supervised import SLABS, Supervised
from tests.processes import PATIENCE_S, wait_for
from wcache.errors import TryAgainError, WcacheError

pytestmark = pytest.mark.process

PTRACE_SEIZE = 0x4206
WALL = 0x40000000


def memfds(pid: int) -> list[str]:
    """Inodes of the memory files that a process holds."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        # A connection may be closed between the listing and the look; what is stored is not.
        with contextlib.suppress(FileNotFoundError):
            if entry.readlink().name.startswith("memfd:"):
                found.append(str(entry.stat().st_ino))
    return sorted(found)


def test_a_rank_is_started_with_a_clean_ground_and_its_loader_beside_it(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_PID", "NOTIFY_SOCKET"):
        monkeypatch.setenv(name, "17")
    parent = supervised.launch("--empty")
    unit = supervised.up()
    (start,) = supervised.starts()
    assert (unit.main_pid, unit.stored_fds, unit.restarts) == (start["pid"], len(SLABS), 0)
    assert (unit.status, unit.result) == ("ready to serve", "")
    assert start["parent"] == parent.pid
    assert start["session"] == start["pid"]
    assert start["stdin"] == "/dev/null"
    # The listing's own descriptor is the one after these.
    assert start["open"][:-1] == [0, 1, 2]
    assert start["blocked"] == 0
    environment = start["environment"]
    assert len(environment.pop("INVOCATION_ID")) == 32
    assert environment == {
        "NOTIFY_SOCKET": str(supervised.places.instance().supervisor_folder / "notify.0"),
        "WATCHDOG_PID": str(start["pid"]),
        "WATCHDOG_USEC": "10000000",
    }
    (load,) = supervised.loads()
    assert load["clean"]
    assert unit.loader == "inactive"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
def test_descriptors_survive_a_daemon_that_is_killed(
    supervised: Supervised, how: signal.Signals
) -> None:
    parent = supervised.launch("--empty")
    supervised.up()
    kept = memfds(parent.pid)
    assert len(kept) == len(SLABS)
    supervised.kill(number=how)
    unit = supervised.wait_active(starts=2)
    assert memfds(parent.pid) == kept
    assert supervised.starts()[1]["fds"] == SLABS
    assert unit.restarts == 1
    assert unit.result == f"signal {how.name.removeprefix('SIG')}"
    assert unit.stored_fds == len(SLABS)
    assert len(supervised.loads()) == 2
    environment = supervised.starts()[1]["environment"]
    assert environment["LISTEN_PID"] == str(supervised.starts()[1]["pid"])
    assert supervised.starts()[1]["open"][:-1] == [0, 1, 2, 3, 4, 5]


def test_more_descriptors_than_a_login_may_open_survive_as_well(supervised: Supervised) -> None:
    many = {f"g1.slab.{index}": str(index) for index in range(100)}
    supervised.order(store=many)
    supervised.launch("--empty", around=("sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh"))
    supervised.up()
    supervised.kill()
    unit = supervised.wait_active(starts=2)
    assert supervised.starts()[1]["fds"] == many
    assert unit.stored_fds == 100


def test_a_restart_by_command_keeps_the_descriptors_and_waits_for_the_new_process(
    supervised: Supervised,
) -> None:
    supervised.launch("--empty")
    first = supervised.up()
    supervised.commands.restart([0])
    assert supervised.show().main_pid not in (0, first.main_pid)
    unit = supervised.wait_active(starts=2)
    assert supervised.starts()[1]["fds"] == SLABS
    assert (unit.restarts, unit.result) == (0, "")


def test_a_daemon_that_hangs_is_aborted_and_restarted_with_its_descriptors(
    supervised: Supervised,
) -> None:
    supervised.timing(watchdog_s=0.5)
    supervised.launch("--empty")
    supervised.order(mode="hang")
    supervised.commands.start([0])
    wait_for(lambda: len(supervised.starts()) == 1, "the daemon runs")
    supervised.order(mode="ready")
    unit = supervised.wait_active(starts=2)
    assert unit.result == "watchdog"
    assert supervised.starts()[1]["fds"] == SLABS


def test_a_daemon_can_ask_for_the_watchdog_and_change_its_period(supervised: Supervised) -> None:
    supervised.timing(watchdog_s=0.5)
    supervised.launch("--empty")
    supervised.up()
    supervised.tell(say="WATCHDOG_USEC=0")
    supervised.kill(number=signal.SIGSTOP)
    with pytest.raises(pytest.fail.Exception):
        wait_for(lambda: supervised.show().restarts > 0, "restarted", timeout_s=1.5)
    supervised.kill(number=signal.SIGCONT)
    supervised.tell(say="STATUS=awake")
    assert supervised.show().restarts == 0
    (supervised.folder / "0.do").write_text('{"say": "WATCHDOG=trigger"}')
    assert supervised.wait_active(starts=2).result == "watchdog"


def test_a_daemon_that_is_never_ready_is_ended_and_tried_again(supervised: Supervised) -> None:
    supervised.timing(start_timeout_s=0.5)
    supervised.launch("--empty")
    supervised.order(mode="silent")
    supervised.commands.start([0])
    wait_for(lambda: len(supervised.starts()) == 2, "a second try")
    assert supervised.show().result == "start timeout"
    assert supervised.starts()[1]["fds"] == SLABS
    supervised.tell(say="EXTEND_TIMEOUT_USEC=60000000")
    with pytest.raises(pytest.fail.Exception):
        wait_for(lambda: len(supervised.starts()) > 2, "a third try", timeout_s=1.0)
    assert supervised.show().state == "starting"


def test_failures_are_tried_again_and_counted_until_the_rank_is_stopped(
    supervised: Supervised,
) -> None:
    supervised.launch("--empty")
    supervised.order(mode="exit", code=3)
    supervised.commands.start([0])
    wait_for(lambda: len(supervised.starts()) >= 4, "automatic restarts")
    unit = supervised.show()
    assert unit.restarts >= 3
    assert unit.result == "exit 3"
    assert supervised.starts()[-1]["fds"] == SLABS
    supervised.commands.stop([0])
    unit = supervised.show()
    assert (unit.state, unit.stored_fds) == ("inactive", 0)
    ended = len(supervised.starts())
    with pytest.raises(pytest.fail.Exception):
        wait_for(lambda: len(supervised.starts()) > ended, "another start", timeout_s=0.5)


def test_an_end_of_the_daemon_that_no_command_asked_for_keeps_the_descriptors(
    supervised: Supervised,
) -> None:
    """A plain kill of its pid makes a daemon end well, and is no order to free its weights."""
    supervised.launch("--empty")
    supervised.order(mode="exit", code=0)
    supervised.commands.start([0])
    wait_for(lambda: len(supervised.starts()) >= 2, "an automatic restart")
    assert supervised.show().result == "exit 0"
    assert supervised.starts()[-1]["fds"] == SLABS


def test_an_unusable_configuration_is_final_and_drops_the_descriptors(
    supervised: Supervised,
) -> None:
    parent = supervised.launch("--empty")
    supervised.order(mode="exit", code=78)
    supervised.commands.start([0])
    unit = supervised.wait_state("failed")
    assert unit.result == "exit 78"
    assert (unit.stored_fds, unit.restarts, unit.main_pid) == (0, 0, 0)
    assert memfds(parent.pid) == []
    assert len(supervised.starts()) == 1
    supervised.order()
    assert supervised.up().stored_fds == len(SLABS)
    assert supervised.starts()[1]["fds"] == {}


def test_a_stop_drops_the_descriptors_and_returns_when_all_has_ended(
    supervised: Supervised,
) -> None:
    parent = supervised.launch("--empty")
    supervised.order(slow_stop=0.4)
    supervised.order_loader(seconds=600)
    supervised.commands.start([0])
    supervised.wait_state("active")
    wait_for(lambda: len(supervised.loads()) == 1, "the loader runs")
    assert supervised.show().loader == "running"
    supervised.commands.stop([0])
    for pid in (supervised.starts()[0]["pid"], supervised.loads()[0]["pid"]):
        assert not Path(f"/proc/{pid}").exists()
    assert memfds(parent.pid) == []
    unit = supervised.show()
    assert (unit.state, unit.result, unit.stored_fds) == ("inactive", "", 0)
    assert (unit.loader, unit.loader_pid, unit.loader_result) == ("inactive", 0, "")


def test_what_ignores_sigterm_is_killed(supervised: Supervised) -> None:
    supervised.timing(stop_timeout_s=0.3)
    supervised.launch("--empty")
    supervised.order(mode="deaf")
    supervised.order_loader(seconds=600, deaf=True)
    supervised.commands.start([0])
    supervised.wait_state("active")
    wait_for(lambda: len(supervised.loads()) == 1, "the loader runs")
    supervised.commands.stop([0])
    unit = supervised.show()
    assert (unit.state, unit.result) == ("inactive", "stop timeout")
    for pid in (supervised.starts()[0]["pid"], supervised.loads()[0]["pid"]):
        assert not Path(f"/proc/{pid}").exists()


def test_a_loader_that_nothing_can_end_is_named_and_not_waited_for(supervised: Supervised) -> None:
    """As one is that waits for a disk which does not answer."""
    supervised.timing(stop_timeout_s=0.3, stuck_s=0.3)
    supervised.launch("--empty")
    supervised.order_loader(seconds=600)
    supervised.commands.start([0])
    supervised.wait_state("active")
    wait_for(lambda: len(supervised.loads()) == 1, "the loader runs")
    loader = supervised.loads()[0]["pid"]
    with kept_from_ending(loader):
        with pytest.raises(WcacheError, match=f"pid {loader} was killed and does not") as caught:
            supervised.commands.stop([0])
        assert "its memory is free when" in str(caught.value.hint)
        assert supervised.show().state == "inactive"
        # The next up is told as much, and loads once that one has ended.
        supervised.commands.start([0])
        unit = supervised.wait_state("active")
        assert (unit.loader, unit.loader_pid) == ("failed", loader)
        assert "does not end" in unit.loader_result
    wait_for(lambda: len(supervised.loads()) == 2, "another loader runs")
    assert supervised.show().loader == "running"


@contextlib.contextmanager
def kept_from_ending(pid: int) -> Iterator[None]:
    """Has the process stay where it is whatever it is sent: it is for its tracer to see its end."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_SEIZE, pid, None, None):
        pytest.skip(f"processes can not be traced here: {os.strerror(ctypes.get_errno())}")
    yield
    os.waitpid(pid, WALL)


def test_a_rank_that_is_being_stopped_takes_no_other_command(supervised: Supervised) -> None:
    supervised.launch("--empty")
    supervised.order(slow_stop=1.0)
    supervised.up()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            supervised.commands.stop([0])
            code = 0
        finally:
            os._exit(code)
    supervised.wait_state("stopping")
    with pytest.raises(TryAgainError, match="rank 0 is being stopped"):
        supervised.commands.start([0])
    with pytest.raises(TryAgainError, match="rank 0 is being stopped"):
        supervised.commands.restart([0])
    assert os.waitpid(child, 0)[1] == 0


def test_one_rank_that_dies_leaves_the_others_alone(supervised: Supervised) -> None:
    supervised.launch("--empty")
    supervised.commands.start([0, 1])
    other = supervised.wait_active(1)
    supervised.wait_active(0)
    supervised.kill(0)
    supervised.wait_active(0, starts=2)
    assert supervised.show(1) == other
    supervised.commands.stop([0])
    assert supervised.show(1) == other


def test_a_loader_that_fails_is_shown_and_run_again_only_when_asked(
    supervised: Supervised,
) -> None:
    supervised.launch("--empty")
    supervised.order_loader(code=5)
    unit = supervised.up()
    assert (unit.loader, unit.loader_result, unit.state) == ("failed", "exit 5", "active")
    supervised.order_loader(code=0)
    supervised.commands.load([0])
    wait_for(lambda: supervised.show().loader == "inactive", "the loader has ended")
    assert supervised.show().loader_result == ""
    assert len(supervised.loads()) == 2
    with pytest.raises(TryAgainError, match="rank 1 is not up"):
        supervised.commands.load([1])


def test_a_new_daemon_gets_a_loader_of_its_own(supervised: Supervised) -> None:
    supervised.launch("--empty")
    supervised.order_loader(seconds=600)
    supervised.commands.start([0])
    supervised.wait_state("active")
    wait_for(lambda: len(supervised.loads()) == 1, "the loader runs")
    supervised.commands.load([0])
    supervised.kill()
    wait_for(lambda: len(supervised.loads()) == 2, "another loader runs")
    old, new = supervised.loads()
    assert not Path(f"/proc/{old['pid']}").exists()
    assert supervised.show().loader_pid == new["pid"]


def test_restarts_leak_no_descriptor(supervised: Supervised) -> None:
    parent = supervised.launch("--empty")
    supervised.up()
    before = supervised.open_files(parent.pid)
    for starts in range(2, 22):
        supervised.kill()
        supervised.wait_active(starts=starts)
    wait_for(lambda: supervised.open_files(parent.pid) == before, "as many open files as before")
    assert supervised.starts()[-1]["fds"] == SLABS
    supervised.commands.stop([0])
    wait_for(lambda: memfds(parent.pid) == [], "nothing stored")


def test_a_signal_ends_the_supervisor_and_with_it_every_rank(supervised: Supervised) -> None:
    parent = supervised.launch("--empty")
    supervised.commands.start([0, 1])
    supervised.wait_active(0)
    supervised.wait_active(1)
    parent.send_signal(signal.SIGHUP)
    supervised.tell(say="STATUS=still here")
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(PATIENCE_S) == 0
    for rank in (0, 1):
        assert not Path(f"/proc/{supervised.starts(rank)[0]['pid']}").exists()
    assert "every rank is stopped, which frees their weights" in supervised.log()
    assert not supervised.places.instance().supervisor_socket.exists()


def test_a_daemon_that_can_not_be_executed_says_so_in_its_log(supervised: Supervised) -> None:
    supervised.launch("--empty")
    (supervised.folder / "0.json").unlink()
    supervised.commands.start([0])
    wait_for(lambda: supervised.show().restarts >= 2, "automatic restarts")
    assert supervised.show().result == "exit 1"
    log = supervised.places.instance().log_file(0, "daemon").read_text()
    assert "0.json" in log


@pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace of its own needs root")
def test_as_process_1_of_a_container_it_reaps_what_is_left_to_it(supervised: Supervised) -> None:
    namespace = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    around = supervised.launch("--empty", around=namespace)
    supervised.up()
    supervised.tell(orphans=5)
    assert supervised.starts()[0]["parent"] == 1

    def children() -> list[str]:
        listed = Path(f"/proc/{around.pid}/task/{around.pid}/children").read_text().split()
        (first,) = listed
        return Path(f"/proc/{first}/task/{first}/children").read_text().split()

    # The orphans sleep for a moment, so that they are there first and zombies afterwards.
    wait_for(lambda: len(children()) > 1, "orphans")
    wait_for(lambda: len(children()) == 1, "only the daemon is left")
    supervised.commands.restart([0])
    supervised.wait_active(starts=2)
    assert supervised.starts()[1]["fds"] == SLABS
    supervised.commands.shutdown()
    assert supervised.exit_code() == 0


def test_a_load_that_is_asked_for_during_a_load_follows_it(supervised: Supervised) -> None:
    """The one at work may have asked what is wanted before the configuration changed."""
    supervised.launch("--empty")
    supervised.order_loader(seconds=0.5)
    supervised.commands.start([0])
    wait_for(lambda: len(supervised.loads()) == 1, "the loader runs")
    supervised.commands.load([0])
    assert len(supervised.loads()) == 1
    wait_for(lambda: len(supervised.loads()) == 2, "the loader runs again")
    wait_for(lambda: supervised.show().loader == "inactive", "and not for ever")
    assert len(supervised.loads()) == 2
