"""The record of what a rank served: what is believed of it, and when it gives hope."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from wcache.errors import WcacheError
from wcache.fingerprint import Fingerprint
from wcache.served import MAX_BYTES, Served, may_live, read_served, some_of, write_served

pytestmark = pytest.mark.unit

SERVED = Served(
    generation=3,
    manifest_digest="sha256:00",
    fingerprint=Fingerprint(model="m", dtype="bfloat16"),
    leases=(os.getpid(),),
)


def ended_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


def test_a_record_reads_back(tmp_path: Path) -> None:
    file = tmp_path / "0" / "served.json"
    assert read_served(file) is None
    write_served(file, SERVED)
    assert read_served(file) == SERVED


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff\xfe",
        msgspec.json.encode(msgspec.structs.replace(SERVED, version=2)),
        msgspec.json.encode(msgspec.structs.replace(SERVED, generation=0)),
        msgspec.json.encode(msgspec.structs.replace(SERVED, leases=(1,) * 65)),
    ],
    ids=["empty", "no fields", "no text", "version", "generation", "leases"],
)
def test_a_record_that_can_not_be_right_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "served.json"
    file.write_bytes(content)
    with pytest.raises(WcacheError, match=r"served\.json"):
        read_served(file)


def test_no_more_is_read_than_a_record_can_have(tmp_path: Path) -> None:
    file = tmp_path / "served.json"
    file.write_bytes(b" " * MAX_BYTES + msgspec.json.encode(SERVED))
    with pytest.raises(WcacheError, match="can not be read"):
        read_served(file)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    write_served(tmp_path / "other", SERVED)
    (tmp_path / "served.json").symlink_to(tmp_path / "other")
    with pytest.raises(WcacheError, match="can not be read"):
        read_served(tmp_path / "served.json")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "served.json")
    with pytest.raises(WcacheError, match="is not a file of root's or of this user's"):
        read_served(tmp_path / "served.json")


def test_what_another_user_has_written_is_not_believed(tmp_path: Path) -> None:
    file = tmp_path / "served.json"
    write_served(file, SERVED)
    os.chown(file, 65534, 65534)
    with pytest.raises(WcacheError, match="is not a file of root's or of this user's"):
        read_served(file)


def test_a_record_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    large = Fingerprint(switches={"S": "x" * MAX_BYTES})
    with pytest.raises(OSError, match="File too large"):
        write_served(tmp_path / "served.json", msgspec.structs.replace(SERVED, fingerprint=large))
    assert list(tmp_path.iterdir()) == []


def test_hope_needs_a_live_engine_and_the_same_weights() -> None:
    wanted = Fingerprint(dtype="bfloat16")
    assert SERVED.may_come_back(wanted)
    assert not SERVED.may_come_back(None)
    assert not SERVED.may_come_back(Fingerprint(dtype="float32"))
    for leases, hope in [((), False), ((ended_pid(),), False), ((0,), True)]:
        assert msgspec.structs.replace(SERVED, leases=leases).may_come_back(wanted) == hope


def test_a_process_that_nobody_has_waited_for_does_not_live() -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.read() == b""
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not may_live(process.pid)
    assert may_live(os.getpid())
    assert may_live(0)


def test_of_many_engines_some_are_recorded() -> None:
    assert some_of([5, 3, 5]) == (3, 5)
    assert len(some_of(range(1, 1000))) == 64
