"""One line of a log as typed data: what ``logs --json`` prints, one object a line. Pure."""

import re
import time
from typing import Literal

import msgspec

from wcache.paths import RankId
from wcache.supervise.systemd.journal import LogLine

# As :mod:`wcache.log` writes it to a file; who speaks is known by the file.
_LINE = re.compile(
    r"(?P<when>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(?P<ms>\d{3}) (?P<level>[A-Z]{1,16})"
    r"(?: [a-z]{1,16}\[[^\]]{0,64}\]:)? (?P<message>.*)",
    re.DOTALL,
)
UNKNOWN_LEVEL = "INFO"


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A line, who wrote it and when. A field may be added."""

    time: float | None
    """Unix time in seconds; None for a line of a file before the first that has one."""
    instance: str
    """Empty for the default one."""
    rank: int | None
    """None for the supervisor of all ranks."""
    part: Literal["daemon", "loader", "supervisor", "systemd"]
    level: str
    """``DEBUG`` to ``EMERG``: the journal's priority as a word."""
    pid: int | None = None
    """None where only a file was written."""
    message: str
    unit: str | None = None
    """In the journal; None where the line comes from a file, as is ``invocation``."""
    invocation: str | None = None
    """Which start of the unit it was (systemd.exec(5), INVOCATION_ID)."""


def from_journal(line: LogLine) -> LogEntry:
    """Raises :class:`UsageError` for a unit whose instance is no rank."""
    rank_id = RankId.parse(line.rank)
    return LogEntry(
        time=line.when,
        instance=rank_id.instance,
        rank=rank_id.rank,
        part=line.part,
        level=line.level,
        pid=line.pid,
        message=line.text,
        unit=line.unit,
        invocation=line.invocation or None,
    )


def from_file(line: bytes, context: LogEntry) -> LogEntry:
    """``line`` of the file whose line before it was ``context``.

    One without a time and a level, as of a traceback, has those of the line before it.
    """
    text = line.decode(errors="replace")
    match = _LINE.fullmatch(text)
    if match is None:
        return msgspec.structs.replace(context, message=text)
    try:
        # Log files have local time, and where clocks are set back an hour of it comes twice.
        when = time.mktime(time.strptime(match["when"], "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return msgspec.structs.replace(context, message=text)
    return msgspec.structs.replace(
        context,
        time=when + int(match["ms"]) / 1000,
        level=match["level"],
        message=match["message"],
    )
