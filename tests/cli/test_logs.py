"""Logs of several writers, as one."""

from pathlib import Path

import pytest

from tests.cli.snapshot import wcache
from tests.places import Places
from wcache.commands.logs import LogFile, merged

pytestmark = pytest.mark.cli


def line(second: int, text: str) -> bytes:
    return f"2026-11-29 14:00:{second:02},000 INFO {text}".encode()


def test_lines_are_merged_by_time_and_say_who_wrote_them() -> None:
    both = merged([
        ("daemon[0]", [line(1, "a"), line(3, "c")]),
        ("loader[10]", [line(2, "b"), line(4, "d")]),
    ])  # fmt: skip
    assert [one.split(b" | ")[0] for one in both] == [
        b"daemon[0] ", b"loader[10]", b"daemon[0] ", b"loader[10]",
    ]  # fmt: skip
    assert [one[-1:] for one in both] == [b"a", b"b", b"c", b"d"]


def test_a_traceback_stays_behind_its_line() -> None:
    both = merged([
        ("one", [line(1, "bug"), b"Traceback", b"  File"]),
        ("two", [line(2, "later")]),
    ])  # fmt: skip
    assert [one.split(b" | ")[1] for one in both][1:3] == [b"Traceback", b"  File"]


def test_following_takes_whole_lines_and_survives_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nhal")
    log = LogFile("x", path)
    assert log.tail(1) == [b"two"]
    assert log.more() == []
    with path.open("ab") as file:
        file.write(b"f\nnext\n")
    assert log.more() == [b"half", b"next"]
    (tmp_path / "new").write_bytes(b"fresh\n")
    (tmp_path / "new").rename(path)
    assert log.more() == [b"fresh"]
    path.unlink()
    assert log.more() == []


def write(places: Places, name: str, lines: list[bytes]) -> None:
    folder = places.root / "state" / "log"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"".join(one + b"\n" for one in lines))


def test_logs_that_ranks_left_behind_are_shown(places: Places) -> None:
    write(places, "wcache.0.daemon.log", [line(1, "d0"), line(5, "d0 end")])
    write(places, "wcache.1.loader.log", [line(2, "l1")])
    write(places, "wcache.supervisor.log", [line(3, "s")])
    write(places, "draft.0.daemon.log", [line(4, "of another instance")])
    done = wcache(places, "logs")
    assert [one.split(" INFO ")[1] for one in done.stdout.splitlines()] == [
        "d0", "l1", "s", "d0 end",
    ]  # fmt: skip
    assert done.code == 0
    assert wcache(places, "logs", "-n", "1").stdout.endswith("d0 end\n")
    loader = wcache(places, "logs", "--loader").stdout.splitlines()
    assert loader == ["loader[1] | " + line(2, "l1").decode()]
    assert "d0" not in wcache(places, "logs", "--supervisor").stdout
