"""The load that is under way for a rank: who does it, and how far it is."""

import time
from dataclasses import dataclass, field

from wcache.protocol import Progress
from wcache.reports import How, ProgressReport
from wcache.units import size

MAX_PHASE = 32


@dataclass(kw_only=True, slots=True)
class Load:
    """The load under way, and the peer that alone may finish it."""

    peer: int
    pid: int
    generation: int
    how: How
    """What its weights will be."""
    is_staging: bool = False
    """An operator wants the weights beside those that are served, unless he changes his mind."""
    phase: str = "start"
    done_bytes: int = 0
    total_bytes: int = 0
    since: float = field(default_factory=time.time)

    def advance(self, message: Progress) -> None:
        self.phase = message.phase[:MAX_PHASE]
        self.done_bytes = max(0, message.done_bytes)
        self.total_bytes = max(0, message.total_bytes)

    def report(self) -> ProgressReport:
        return ProgressReport(
            generation=self.generation,
            loader_pid=self.pid,
            phase=self.phase,
            done_bytes=self.done_bytes,
            total_bytes=self.total_bytes,
            since=self.since,
        )

    def in_words(self) -> str:
        if not self.total_bytes:
            return self.phase
        done, total = size(self.done_bytes), size(self.total_bytes)
        return f"{self.phase} {done} of {total} ({100 * self.done_bytes // self.total_bytes} %)"
