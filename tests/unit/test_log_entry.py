"""Lines of files and of the journal as typed data."""

import time

import msgspec
import pytest

from wcache.commands.log_entry import LogEntry, from_file, from_journal
from wcache.supervise.systemd.journal import LogLine

pytestmark = pytest.mark.unit

ORIGIN = LogEntry(time=None, instance="draft", rank=3, part="daemon", level="INFO", message="")


def test_a_line_of_a_file_has_its_time_its_level_and_its_words() -> None:
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1700000000))
    line = f"{moment},250 WARNING daemon[draft:3]: disk is full".encode()
    assert from_file(line, ORIGIN) == LogEntry(
        time=1700000000.25, instance="draft", rank=3, part="daemon", level="WARNING",
        message="disk is full",
    )  # fmt: skip


def test_a_supervisor_names_no_rank_in_its_lines() -> None:
    found = from_file(b"2026-11-29 14:00:01,000 ERROR supervisor[default]: x [1]: y", ORIGIN)
    assert (found.level, found.message) == ("ERROR", "x [1]: y")


def test_a_traceback_has_time_and_level_of_the_line_above_it() -> None:
    above = from_file(b"2026-11-29 14:00:01,000 ERROR daemon[3]: a bug", ORIGIN)
    found = from_file(b"Traceback (most recent call last):", above)
    assert found == msgspec.structs.replace(above, message="Traceback (most recent call last):")


@pytest.mark.parametrize(
    "line", [b"", b"\xff\x00", b"9999-99-99 99:99:99,999 INFO x", b"2026-11-29 14:00:01,000 "]
)
def test_a_line_that_is_none_of_ours_is_kept_as_it_is(line: bytes) -> None:
    found = from_file(line, ORIGIN)
    assert found == msgspec.structs.replace(ORIGIN, message=line.decode(errors="replace"))


def test_what_drives_a_terminal_does_not_leave_json() -> None:
    found = msgspec.json.encode(from_file(b"\x1b[2Jgone", ORIGIN))
    assert b"\x1b" not in found
    assert msgspec.json.decode(found, type=LogEntry).message == "\x1b[2Jgone"


def test_an_entry_of_the_journal_keeps_what_the_journal_knows() -> None:
    line = LogLine(
        when=1.5, part="systemd", rank="draft:3", level="NOTICE", text="Started.", pid=1,
        unit="wcache@draft:3.service", invocation="ab",
    )  # fmt: skip
    assert from_journal(line) == LogEntry(
        time=1.5, instance="draft", rank=3, part="systemd", level="NOTICE", pid=1,
        message="Started.", unit="wcache@draft:3.service", invocation="ab",
    )  # fmt: skip
