"""Where the time of an engine's start went: one record a run, and the table made of it."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from wcache.engines.orders import MAX_EVENTS_BYTES, Event, Outcome
from wcache.output import Table

PHASES = (
    "imports",
    "distributed",
    "weights",
    "compile",
    "profile",
    "capture",
    "init",
    "server",
    "port",
    "first token",
)
"""What a start can consist of. An engine's log tells the end of some of them; the time of one that
it does not tell is part of the next one that it does."""

STEPS = ("attach", "fetch", "map", "build", "bind", "process", "read", "publish")
"""What the phase ``weights`` consists of, as the engine's half of an adapter reports it."""

OF_ATTACH = ("fetch", "map", "build", "bind", "process")
"""The steps whose time is in that of ``attach`` too."""

VERSION = 1
MAX_RECORD_BYTES = 4 << 20
KEPT_RECORDS = 100

Source = Literal["log", "event", "probe"]


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """From the end of the phase before it, or the start of the process, to its own end."""

    name: str
    begin_s: float
    """Seconds since the process was started."""
    end_s: float
    source: Source
    """Who told its end: the engine's log, an event of wcache's, or the probe."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the phase ``weights``, as one rank measured it."""

    rank: int
    name: str
    seconds: float


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One run, from the start of the process on."""

    version: int = VERSION
    began: float
    """Unix time."""
    engine: str
    """Name of the adapter; empty for a command that none recognises."""
    command: tuple[str, ...]
    mode: str
    instance: str
    outcome: Outcome | None
    """None when the engine told none."""
    reason: str
    phases: tuple[Phase, ...]
    steps: tuple[Step, ...]
    ready_s: float | None
    """Seconds to the first token, or to ``tokenless``; None when neither came."""
    tokenless: str = ""
    """Why the engine counts as ready though it gave no token; empty when it gave one."""
    exit_code: int | None = None
    """None while the engine runs."""


class Timeline:
    """Gathers the ends of phases while an engine starts. Times are seconds since its start."""

    def __init__(self) -> None:
        self._ends: dict[str, tuple[float, Source]] = {}

    def end(self, phase: str, at_s: float, source: Source) -> None:
        """Notes the end of ``phase``; of several ranks that end one, the last one counts.

        A phase that comes again once a later one is over (an engine that loads a second model, a
        line that a request made) is not a phase of the start any more.
        """
        later = PHASES[PHASES.index(phase) + 1 :]
        if all(at_s <= self._ends[name][0] for name in later if name in self._ends):
            self._ends[phase] = (at_s, source)

    @property
    def last(self) -> str:
        """The last phase that is over; empty before the first one is."""
        return max(self._ends, key=lambda name: self._ends[name], default="")

    def phases(self) -> tuple[Phase, ...]:
        begin = 0.0
        found = []
        for name, (end, source) in sorted(self._ends.items(), key=lambda item: item[1]):
            found.append(Phase(name=name, begin_s=begin, end_s=end, source=source))
            begin = end
        return tuple(found)


def steps(events: Iterable[Event]) -> tuple[Step, ...]:
    """What each rank measured, in the order in which it was told."""
    return tuple(
        Step(rank=event.rank or 0, name=event.name, seconds=event.seconds)
        for event in events
        if event.seconds is not None and event.name in STEPS
    )


def read_events(path: Path) -> list[Event]:
    """The events of a run; a line that is none is passed over, a file too long is cut."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_EVENTS_BYTES)
    except OSError:
        return []
    found = []
    for line in data.split(b"\n"):
        try:
            found.append(msgspec.json.decode(line, type=Event))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return found


def table(record: Record) -> Table:
    """Phases, and below ``weights`` its steps by the slowest rank, below what each is part of."""
    shown = Table("PHASE", ">TIME", ">AT", "TOLD BY")
    for phase in record.phases:
        shown.add(phase.name, _seconds(phase.seconds), _seconds(phase.end_s), phase.source)
        if phase.name == "weights":
            slowest = dict(_slowest(record.steps))
            for name, seconds in slowest.items():
                dash = "- -" if name in OF_ATTACH and "attach" in slowest else "-"
                shown.add(f"{dash} {name}", _seconds(seconds), None, "event")
    return shown


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s"


def _slowest(told: Sequence[Step]) -> list[tuple[str, float]]:
    """Of each step the longest time that a rank took, in the order of :data:`STEPS`."""
    longest: dict[str, float] = {}
    for step in told:
        longest[step.name] = max(step.seconds, longest.get(step.name, 0.0))
    return [(name, longest[name]) for name in STEPS if name in longest]


# --- files ------------------------------------------------------------------------------------


def save(record: Record, folder: Path, name: str) -> Path:
    """Writes ``folder/name.json``, so that a reader never sees half of it; drops the oldest."""
    folder.mkdir(parents=True, exist_ok=True)
    path, fresh = folder / f"{name}.json", folder / f".{name}.{os.getpid()}"
    try:
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    for old in records(folder)[:-KEPT_RECORDS]:
        old.unlink(missing_ok=True)
    return path


def records(folder: Path) -> list[Path]:
    """Files of records, the oldest first: their names begin with the time."""
    return sorted(folder.glob("[0-9]*.json"))


def load(path: Path) -> Record | None:
    """None for a file that is no record of this version."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RECORD_BYTES)
        record = msgspec.json.decode(data, type=Record)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return record if record.version == VERSION else None
