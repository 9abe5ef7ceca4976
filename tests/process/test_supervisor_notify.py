"""What a supervisor believes on its notify socket, and from whom."""

import array
import os
import socket
from pathlib import Path

import pytest

from tests.process.supervised import SLABS, Supervised
from tests.processes import wait_for

pytestmark = pytest.mark.process


def say(path: Path, data: bytes, fds: list[int] | None = None) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.sendmsg([data], rights, 0, str(path))


def test_only_the_daemon_itself_is_believed(supervised: Supervised) -> None:
    parent = supervised.launch("--empty")
    supervised.up()
    before = supervised.open_files(parent.pid)
    notify = supervised.places.instance().supervisor_folder / "notify.0"
    fd = os.memfd_create("not wanted")
    say(notify, b"FDSTORE=1\nFDNAME=g9.slab.0", [fd])
    say(notify, b"FDSTOREREMOVE=1\nFDNAME=g1.slab.0")
    say(notify, b"STATUS=of somebody else")
    os.close(fd)
    # A child of the daemon is somebody else too; its barrier comes after all that was said before.
    supervised.tell(child_says="STATUS=of a child", fds=1)
    unit = supervised.show()
    assert (unit.stored_fds, unit.status) == (len(SLABS), "ready to serve")
    assert f"message of pid {os.getpid()}, which is not the daemon, is refused" in supervised.log()
    wait_for(lambda: supervised.open_files(parent.pid) == before, "refused descriptors are closed")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe\xfd" * 100,
        b"FDSTORE=1\0FDNAME=x",
        b"BARRIER=1\nFDSTORE=1",
        b"FDSTOREREMOVE=1",
        b"FDSTOREREMOVE=1\nFDNAME=a:b",
        b"FDNAME=g1.slab.0",
        b"WATCHDOG_USEC=99999999999999999999999999999999",
        b"x" * 5000,
        b"FDSTORE=1\n" + b"x" * 5000,
    ],
    ids=lambda data: repr(data[:20]),
)
def test_garbage_from_the_daemon_changes_nothing(supervised: Supervised, data: bytes) -> None:
    parent = supervised.launch("--empty")
    first = supervised.up()
    before = supervised.open_files(parent.pid)
    assert supervised.tell(hex=data.hex(), fds=3) is True
    assert supervised.show() == first
    wait_for(lambda: supervised.open_files(parent.pid) == before, "its descriptors are closed")


def test_descriptors_are_added_and_removed_by_name(supervised: Supervised) -> None:
    supervised.launch("--empty")
    supervised.up()
    assert supervised.tell(say="FDSTORE=1\nFDPOLL=0\nFDNAME=g2.slab.0", fds=2) is True
    assert supervised.show().stored_fds == len(SLABS) + 2
    assert supervised.tell(say="FDSTOREREMOVE=1\nFDNAME=g2.slab.0") is True
    assert supervised.show().stored_fds == len(SLABS)
    supervised.tell(say="FDSTORE=1\nFDPOLL=0\nFDNAME=a:b", fds=1)
    supervised.kill()
    supervised.wait_active(starts=2)
    assert supervised.starts()[1]["fds"] == {**SLABS, "stored": ""}


def test_a_barrier_is_confirmed_after_everything_that_was_said_before_it(
    supervised: Supervised,
) -> None:
    supervised.launch("--empty")
    supervised.up()
    for number in range(20):
        # The fake daemon ends each order with a barrier and returns whether it was confirmed.
        assert supervised.tell(say=f"STATUS=step {number}") is True
        assert supervised.show().status == f"step {number}"


def test_more_descriptors_than_the_store_takes_are_closed(supervised: Supervised) -> None:
    parent = supervised.launch("--empty")
    supervised.up()
    long_name = "n" * 250
    for _ in range(3):
        supervised.tell(say=f"FDSTORE=1\nFDPOLL=0\nFDNAME={long_name}", fds=250)
    stored = supervised.show().stored_fds
    assert len(SLABS) < stored < len(SLABS) + 750
    assert "is not stored" in supervised.log()
    wait_for(lambda: supervised.open_files(parent.pid) < stored + 40, "the others are closed")
    supervised.kill()
    supervised.wait_active(starts=2)
    assert SLABS.items() <= supervised.starts()[1]["fds"].items()
