"""What became of an engine's wish for cached weights, over all of its ranks, and how often."""

import fcntl
import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from wcache.engines.orders import Event, Outcome

# The first that any rank tells is the outcome of the run: one rank that read the disk makes it no
# hit.
_GRAVEST: tuple[Outcome, ...] = ("mismatch", "miss", "published", "hit", "off")
_MAX_COUNTS_BYTES = 64 << 10


def outcome_of(events: Iterable[Event]) -> tuple[Outcome | None, str]:
    """The outcome and its reason in one sentence; None when no rank told one."""
    told: dict[Outcome, list[Event]] = {}
    for event in events:
        if event.outcome is not None:
            told.setdefault(event.outcome, []).append(event)
    for outcome in _GRAVEST:
        if found := told.get(outcome):
            return outcome, _sentence(found)
    return None, ""


def _sentence(events: list[Event]) -> str:
    """Every reason once, with the ranks that gave it."""
    ranks: dict[str, list[int]] = {}
    for event in events:
        ranks.setdefault(event.reason, []).append(event.rank or 0)
    return "; ".join(_of(sorted(set(who)), reason) for reason, who in ranks.items())


def _of(ranks: list[int], reason: str) -> str:
    if len(ranks) == 1 and re.match(rf"rank (?:[\w.-]+:)?{ranks[0]}\b", reason):
        return reason  # it says itself whose it is
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {reason}"


def count(path: Path, outcome: Outcome) -> None:
    """Adds one to the number of ``outcome`` in a file that several runs may change at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    with os.fdopen(fd, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        counts = _counts(file.read(_MAX_COUNTS_BYTES))
        counts[outcome] = counts.get(outcome, 0) + 1
        file.seek(0)
        file.write(msgspec.json.encode(counts, order="sorted") + b"\n")
        file.truncate()


def counts(path: Path) -> dict[str, int]:
    """How often each outcome came about; empty before the first run."""
    try:
        with path.open("rb") as file:
            return _counts(file.read(_MAX_COUNTS_BYTES))
    except OSError:
        return {}


def _counts(data: bytes) -> dict[str, int]:
    try:
        return msgspec.json.decode(data, type=dict[str, int])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}  # a crash in the middle of a write; counting begins anew
