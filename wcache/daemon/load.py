"""The load that is under way for a rank: who does it, and how far it is."""

import time
from dataclasses import dataclass, field

from wcache.protocol.messages import Progress
from wcache.protocol.reports import How, ProgressReport
from wcache.units import size

MAX_PHASE = 32
# Imports and a plan take many seconds, and nothing is heard of them.
QUIET_S = 60.0


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
    moved: float = field(default_factory=time.monotonic)
    """CLOCK_MONOTONIC of the last progress."""

    def advance(self, message: Progress) -> None:
        before = self.phase, self.done_bytes, self.total_bytes
        self.phase = message.phase[:MAX_PHASE]
        self.done_bytes = max(0, message.done_bytes)
        self.total_bytes = max(0, message.total_bytes)
        if (self.phase, self.done_bytes, self.total_bytes) != before:
            self.moved = time.monotonic()

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
        words = self.phase
        if self.total_bytes:
            done, total = size(self.done_bytes), size(self.total_bytes)
            words += f" {done} of {total} ({100 * self.done_bytes // self.total_bytes} %)"
        quiet = time.monotonic() - self.moved
        if quiet >= QUIET_S:
            # A stopped process, or a file server that is away; nobody ends it for that. In whole
            # minutes, since every change of the sentence is a message to the supervisor.
            words += f", no progress of pid {self.pid} for {int(quiet // 60)} min"
        return words
