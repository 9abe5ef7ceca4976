"""A supervisor that lost its files or its time is still the one of its instance."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.places import remove_at_once
from tests.process.supervised import LAUNCH, SLABS, Supervised
from tests.processes import PATIENCE_S, end, wait_for
from wcache.errors import TryAgainError
from wcache.protocol import name
from wcache.supervise.direct import client

pytestmark = pytest.mark.process

NOBODY = 65534


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_TIMEOUT_S", 0.5)


def halt(parent: "subprocess.Popen[bytes]") -> None:
    parent.send_signal(signal.SIGSTOP)
    wait_for(lambda: name.is_stopped(parent.pid), "the supervisor is stopped")


def test_a_supervisor_makes_its_files_again_and_keeps_its_ranks(supervised: Supervised) -> None:
    supervised.timing(look_s=0.05, watchdog_s=1.5)
    parent = supervised.launch("--empty")
    pid = supervised.up().main_pid
    paths = supervised.places.instance()
    supervised.places.remove_run()
    # The client waits for it.
    assert supervised.show().main_pid == pid
    record = paths.supervisor_folder / "ranks.json"
    wait_for(record.exists, "what is up is recorded again")
    assert record.read_bytes() == b'{"ranks":[0]}\n'
    # What the daemon says is heard: it stays, and stores.
    assert supervised.tell(say="FDSTORE=1\nFDPOLL=0\nFDNAME=late", fds=1) is True
    assert supervised.show().stored_fds == len(SLABS) + 1
    time.sleep(2)
    assert supervised.show().main_pid == pid
    supervised.commands.stop([0])
    assert not Path(f"/proc/{pid}").exists()
    assert len(supervised.starts()) == 1
    files = supervised.open_files(parent.pid)
    supervised.places.remove_run()
    assert supervised.show().state == "inactive"
    assert supervised.open_files(parent.pid) == files, "descriptors leaked"


def test_no_second_supervisor_begins_where_the_first_ones_files_are_gone(
    supervised: Supervised, impatient: None
) -> None:
    parent = supervised.launch("--empty")
    pid = supervised.up().main_pid
    halt(parent)
    supervised.places.remove_run()
    second = subprocess.run(
        [*LAUNCH, "--empty"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert second.returncode == TryAgainError.exit_code
    assert f"another supervisor (pid {parent.pid}) keeps the default instance" in second.stderr
    with pytest.raises(TryAgainError, match=rf"pid {parent.pid}\) is stopped and does not listen"):
        supervised.commands.stop([0])
    parent.send_signal(signal.SIGCONT)
    wait_for(supervised.places.instance().supervisor_socket.exists, "it listens again")
    assert supervised.show().main_pid == pid
    supervised.commands.shutdown()
    assert supervised.exit_code() == 0
    assert name.keeper(supervised.places.instance()) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace of its own needs root")
def test_a_supervisor_that_is_displaced_leaves_its_daemons_to_the_other(
    supervised: Supervised,
) -> None:
    supervised.timing(look_s=0.05)
    supervised.order(0, control=True)
    parent = supervised.launch("--empty")
    pid = supervised.up().main_pid
    halt(parent)
    folder = supervised.places.instance().supervisor_folder
    remove_at_once(folder)
    # In a mount namespace of its own, as in another container that has the same run folder.
    other = supervised.launch("--empty", around=("unshare", "--mount"))
    supervised.commands.start([0])
    assert supervised.wait_active().main_pid == pid
    parent.send_signal(signal.SIGCONT)
    assert parent.wait(PATIENCE_S) == 0
    assert "the daemons are left to it" in supervised.log()
    assert supervised.show().main_pid == pid
    assert supervised.show().stored_fds == len(SLABS)
    end(other, signal.SIGTERM)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_name_that_somebody_else_has_taken_keeps_no_supervisor_away(
    supervised: Supervised,
) -> None:
    script = (
        "import os, socket, sys, time; s = socket.socket(socket.AF_UNIX);"
        f"os.setuid({NOBODY}); s.bind(chr(0) + sys.argv[1]); s.listen();"
        "print(flush=True); time.sleep(60)"
    )
    taken = name.address(supervised.places.instance()).removeprefix("\0")
    squatter = subprocess.Popen([sys.executable, "-c", script, taken], stdout=subprocess.PIPE)
    try:
        assert squatter.stdout is not None
        assert squatter.stdout.readline() == b"\n"
        assert name.keeper(supervised.places.instance()) is None
        supervised.launch("--empty")
        assert "somebody else has taken the supervisor's name" in supervised.log()
        supervised.up()
    finally:
        end(squatter)


def test_a_stopped_supervisor_is_named_and_not_waited_for_long(
    supervised: Supervised, impatient: None
) -> None:
    parent = supervised.launch("--empty")
    supervised.up()
    halt(parent)
    for ask in (supervised.show, lambda: supervised.commands.start([1])):
        with pytest.raises(TryAgainError, match=rf"pid {parent.pid}\) is stopped") as caught:
            ask()
        assert f"kill -CONT {parent.pid} " in caught.value.hint
        assert f"kill -9 {parent.pid} " in caught.value.hint
    # Nobody has come to an agreement with the supervisor behind the caller's back.
    parent.send_signal(signal.SIGCONT)
    assert supervised.show(1).state == "inactive"


def test_time_that_the_supervisor_did_not_run_is_not_held_against_daemons(
    supervised: Supervised,
) -> None:
    supervised.timing(watchdog_s=1.5)
    parent = supervised.launch("--empty")
    pid = supervised.up().main_pid
    halt(parent)
    time.sleep(3)
    parent.send_signal(signal.SIGCONT)
    wait_for(lambda: "this supervisor did not run for" in supervised.log(), "it notices")
    unit = supervised.show()
    assert (unit.state, unit.main_pid, unit.restarts) == ("active", pid, 0)
    # One that hangs is still found.
    os.kill(pid, signal.SIGSTOP)
    supervised.wait_active(starts=2)
