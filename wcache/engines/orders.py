"""What ``wcache run`` tells the half of an adapter that runs inside the engine, and what that
reports back."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from wcache.errors import UsageError
from wcache.protocol.control import COMMAND

INSTANCE = "WCACHE_INSTANCE"
ON_MISMATCH = "WCACHE_ON_MISMATCH"
EVENTS = "WCACHE_EVENTS"
MAX_EVENT_BYTES = 4096
"""A write of so many bytes to a file that was opened for appending is never mixed with another."""
MAX_EVENTS_BYTES = 16 << 20

OnMismatch = Literal["fallback", "fail"]
Outcome = Literal["hit", "miss", "mismatch", "published", "off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """How an engine under ``wcache run`` takes its weights."""

    instance: str = ""
    on_mismatch: OnMismatch = "fallback"
    """Whether an engine that finds no weights that fit may read the disk, or must end."""
    events: Path | None = None
    """The file to which events are appended; None where nobody reads them."""
    command: str = ""
    """As the operator gave it: what leases are listed with; empty for each process's own."""

    def environment(self) -> dict[str, str]:
        """The variables that carry these orders into the engine and all of its processes."""
        told = {INSTANCE: self.instance, ON_MISMATCH: self.on_mismatch}
        if self.events is not None:
            told[EVENTS] = str(self.events)
        if self.command:
            told[COMMAND] = self.command
        return told

    @classmethod
    def given(cls, environment: Mapping[str, str] = os.environ) -> "Orders":
        """The orders of this process; raises :class:`UsageError` for a value that is none."""
        said = environment.get(ON_MISMATCH, "fallback")
        if said not in ("fallback", "fail"):
            raise UsageError(f"{ON_MISMATCH} is {said!r}", hint="it is fallback or fail")
        events = environment.get(EVENTS)
        return cls(
            instance=environment.get(INSTANCE, ""),
            on_mismatch="fail" if said == "fail" else "fallback",
            events=Path(events) if events else None,
        )


def is_ordered(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process runs under ``wcache run``, or is told as by it what to do on a miss."""
    return ON_MISMATCH in environment


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened inside an engine's process; one line of JSON in the events file."""

    at: float
    """Unix time of its end."""
    pid: int
    rank: int | None = None
    name: str
    """``attach``, ``fetch``, ``map``, ``build``, ``bind``, ``process``, ``publish``, ``read``,
    ``outcome``; ``imports`` and ``distributed`` where a log tells of neither; ``first_token``."""
    seconds: float | None = None
    """How long it took; None for a moment."""
    outcome: Outcome | None = None
    reason: str = ""
    """In one sentence, for ``outcome``."""


def report(
    orders: Orders,
    name: str,
    *,
    seconds: float | None = None,
    rank: int | None = None,
    outcome: Outcome | None = None,
    reason: str = "",
) -> None:
    """Appends an event; does nothing without a file, and never fails an engine for it."""
    if orders.events is None:
        return
    event = Event(
        at=time.time(), pid=os.getpid(), rank=rank, name=name, seconds=seconds,
        outcome=outcome, reason=reason[: MAX_EVENT_BYTES // 8],
    )  # fmt: skip
    line = msgspec.json.encode(event) + b"\n"
    if len(line) > MAX_EVENT_BYTES:
        return
    try:
        fd = os.open(orders.events, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)
    except OSError:
        return


_marked = False


def first_token() -> None:
    """A script's own mark that it is ready: it has its first real token, and serves from here on.

    ``wcache run`` ends the start's timeline here, and tells a supervisor that the service is up. It
    does nothing elsewhere, nor when it is called again.
    """
    global _marked
    if _marked:
        return
    _marked = True
    number = os.environ.get("RANK", "")
    rank = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else None
    report(Orders.given(), "first_token", rank=rank)
