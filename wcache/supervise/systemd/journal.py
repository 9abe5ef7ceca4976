"""Entries of the journal as lines of a rank's log. Pure."""

import time
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

Part = Literal["daemon", "loader", "systemd"]
"""Who writes; systemd does so about a rank's units."""

LEVELS = ("EMERG", "ALERT", "CRITICAL", "ERROR", "WARNING", "NOTICE", "INFO", "DEBUG")
FIELDS = (
    "MESSAGE", "PRIORITY", "_PID", "_SYSTEMD_UNIT", "_SYSTEMD_USER_UNIT", "UNIT", "USER_UNIT",
    "_SYSTEMD_INVOCATION_ID", "INVOCATION_ID", "USER_INVOCATION_ID",
)  # fmt: skip
_UNKNOWN_LEVEL = 6


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Of ``journalctl -o json``; a message that is no text, or too long, is not a string."""

    realtime: str = msgspec.field(name="__REALTIME_TIMESTAMP", default="0")
    message: Any = msgspec.field(name="MESSAGE", default=None)
    priority: str = msgspec.field(name="PRIORITY", default="")
    # Of the process that wrote it, and of the unit that systemd writes about.
    own_unit: str = msgspec.field(name="_SYSTEMD_UNIT", default="")
    own_user_unit: str = msgspec.field(name="_SYSTEMD_USER_UNIT", default="")
    about: str = msgspec.field(name="UNIT", default="")
    about_user: str = msgspec.field(name="USER_UNIT", default="")
    pid: str = msgspec.field(name="_PID", default="")
    own_invocation: str = msgspec.field(name="_SYSTEMD_INVOCATION_ID", default="")
    about_invocation: str = msgspec.field(name="INVOCATION_ID", default="")
    about_user_invocation: str = msgspec.field(name="USER_INVOCATION_ID", default="")


_DECODER = msgspec.json.Decoder(_Entry)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """One line, and who wrote it."""

    when: float
    """Unix time."""
    part: Part
    rank: str
    """As in the unit's name: ``3`` or ``NAME:3``."""
    level: str
    text: str
    pid: int | None = None
    """Of who wrote it; 1 for the system's manager."""
    unit: str = ""
    invocation: str = ""
    """Of that start of ``unit`` (systemd.exec(5), INVOCATION_ID); empty where it was not said."""

    @property
    def label(self) -> str:
        return f"{self.part}[{self.rank}]"

    def __str__(self) -> str:
        """As :mod:`wcache.log` writes it to a file."""
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.when))
        return f"{moment},{int(self.when * 1000) % 1000:03} {self.level} {self.text}"


def log_line(data: bytes, daemon_prefix: str, loader_prefix: str) -> LogLine | None:
    """The line of one entry; None for one that is of no rank's unit, or can not be read."""
    try:
        entry = _DECODER.decode(data)
    except msgspec.DecodeError:
        return None
    own = entry.own_user_unit or entry.own_unit
    about = entry.about or entry.about_user
    unit = about or own
    part: Part
    if unit.startswith(daemon_prefix):
        part, rank = "daemon", unit.removeprefix(daemon_prefix)
    elif unit.startswith(loader_prefix):
        part, rank = "loader", unit.removeprefix(loader_prefix)
    else:
        return None
    priority = int(entry.priority) if entry.priority.isdigit() else _UNKNOWN_LEVEL
    return LogLine(
        when=int(entry.realtime) / 1e6 if entry.realtime.isdigit() else 0.0,
        part="systemd" if about else part,
        rank=rank.removesuffix(".service"),
        level=LEVELS[priority] if priority < len(LEVELS) else LEVELS[_UNKNOWN_LEVEL],
        text=_text(entry.message),
        pid=int(entry.pid) if entry.pid.isdigit() else None,
        unit=unit,
        invocation=(
            entry.about_invocation or entry.about_user_invocation if about else entry.own_invocation
        ),
    )


def _text(message: object) -> str:
    if isinstance(message, str):
        return message
    # Bytes that are no UTF-8 come as a list of numbers, a message over 4 KiB may come as null.
    if isinstance(message, list) and all(isinstance(n, int) and 0 <= n < 256 for n in message):
        return bytes(message).decode(errors="replace")
    return "(no text)"
