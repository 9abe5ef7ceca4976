"""Logs of several writers, as one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.snapshot import environment, wcache
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


def test_following_loses_nothing_of_a_file_that_was_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\nhal")
    log = LogFile("x", path)
    assert log.tail(1) == [b"one"]
    with path.open("ab") as file:
        file.write(b"f\ncrash\n")
    path.rename(tmp_path / "log.1")
    path.write_bytes(b"anew\n")
    assert log.more() == [b"half", b"crash", b"anew"]
    assert log.more() == []


def test_the_last_lines_are_those_of_before_a_large_file_was_moved_away_too(
    places: Places,
) -> None:
    write(places, "wcache.0.daemon.log.1", [line(1, "started"), line(2, "crash")])
    write(places, "wcache.0.daemon.log", [line(4, "started again")])
    write(places, "wcache.1.daemon.log.1", [line(3, "of rank 1")])
    assert words(places, "logs") == ["started", "crash", "of rank 1", "started again"]
    assert words(places, "logs", "0", "-n", "2") == ["crash", "started again"]
    assert wcache(places, "logs", "2").code == 4


def words(places: Places, *arguments: str) -> list[str]:
    return [one.split(" INFO ")[1] for one in wcache(places, *arguments).stdout.splitlines()]


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


def test_every_line_is_an_object_of_its_own(places: Places) -> None:
    write(places, "draft.0.daemon.log", [line(1, "daemon[draft:0]: d0"), b"Traceback"])
    write(places, "draft.1.loader.log", [line(2, "loader[draft:1]: l1")])
    write(places, "draft.supervisor.log", [line(3, "supervisor[draft]: s")])
    done = wcache(places, "logs", "--instance", "draft", "--json")
    found = [json.loads(one) for one in done.stdout.splitlines()]
    assert [(one["part"], one["rank"], one["message"]) for one in found] == [
        ("daemon", 0, "d0"), ("daemon", 0, "Traceback"), ("loader", 1, "l1"),
        ("supervisor", None, "s"),
    ]  # fmt: skip
    assert found[1]["time"] == found[0]["time"] == found[2]["time"] - 1
    assert {one["instance"] for one in found} == {"draft"}
    of_daemons = ("--instance", "draft", "--daemon", "-n", "1", "--json")
    last = wcache(places, "logs", *of_daemons).stdout
    # Its time is known, although the line that has it is not shown.
    assert json.loads(last) == found[1]


@pytest.mark.process
def test_following_prints_each_object_as_it_comes(places: Places) -> None:
    write(places, "wcache.0.daemon.log", [line(1, "daemon[0]: old")])
    process = subprocess.Popen(
        [sys.executable, "-m", "wcache", "logs", "--json", "-f"], env=environment(places),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout
        assert json.loads(process.stdout.readline())["message"] == "old"
        with (places.root / "state/log/wcache.0.daemon.log").open("ab") as file:
            file.write(line(2, "daemon[0]: new\n"))
        assert json.loads(process.stdout.readline())["message"] == "new"
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()
