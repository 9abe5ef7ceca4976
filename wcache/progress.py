"""How far loads are, on stderr: bars on a terminal, sparse plain lines in a log."""

import os
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from wcache.streams import talk
from wcache.units import GIB, duration, size

if TYPE_CHECKING:
    from rich.progress import TaskID

PLAIN_PERIOD_S = 5.0
_BAR_WIDTHS = (8, 30)
"""Columns that a bar has at least, or it is left out, and at most."""
# "digest  131.0 of 131.0 GiB  11.42 GB/s, 118 s left": this is read, the bar is only looked at.
_SAID_WIDTH = 51


class Speed:
    """Bytes a second of the phase under way, from reports that come now and then."""

    def __init__(self) -> None:
        self._phase = ""
        self._begun = (0, 0.0)
        self._latest = (0, 0.0)

    def see(self, phase: str, done_bytes: int, now: float) -> None:
        if phase != self._phase or done_bytes < self._latest[0]:
            self._phase, self._begun = phase, (done_bytes, now)
        self._latest = (done_bytes, now)

    @property
    def bytes_per_s(self) -> float:
        """Mean over the phase; 0 while nothing is known."""
        seconds = self._latest[1] - self._begun[1]
        return (self._latest[0] - self._begun[0]) / seconds if seconds > 0 else 0.0

    def remaining_s(self, total_bytes: int) -> float | None:
        """Until the phase ends at this speed; None while there is no speed."""
        speed = self.bytes_per_s
        return max(0.0, (total_bytes - self._latest[0]) / speed) if speed > 0 else None

    def sentence(self, total_bytes: int) -> str:
        """``1.42 GB/s, 12 s left``, in 10^9 bytes; empty while there is no speed."""
        remaining = self.remaining_s(total_bytes)
        if remaining is None:
            return ""
        return f"{self.bytes_per_s / 1e9:.2f} GB/s, {duration(remaining)} left"


class Bars:
    """Shows nothing: what a quiet command draws on. The others say what the calls mean."""

    def step(self, label: str, phase: str, done_bytes: int, total_bytes: int) -> None:
        """``label`` is in ``phase``; ``total_bytes`` of 0 when there is nothing to measure."""

    def end(self, label: str, outcome: str) -> None:
        """``label`` is done, one way or the other; ``outcome`` is a word or a sentence."""

    def close(self) -> None:
        """Draws for the last time; safe to call twice."""

    def __enter__(self) -> "Bars":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class PlainBars(Bars):
    """One line for each change of phase, and one every few seconds while bytes move."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._phases = dict.fromkeys(labels, "")
        self._said = dict.fromkeys(labels, 0.0)
        self._speeds = {label: Speed() for label in labels}

    def step(self, label: str, phase: str, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        speed = self._speeds[label]
        speed.see(phase, done_bytes, now)
        if phase != self._phases[label]:
            self._phases[label] = phase
            of = f" {size(total_bytes)}" if total_bytes else ""
            self._say(label, f"{phase}{of}", now)
        elif total_bytes and now - self._said[label] >= PLAIN_PERIOD_S:
            percent = 100 * done_bytes // total_bytes
            tail = speed.sentence(total_bytes)
            text = f"{phase} {size(done_bytes)} of {size(total_bytes)} ({percent} %)"
            self._say(label, f"{text}, {tail}" if tail else text, now)

    def end(self, label: str, outcome: str) -> None:
        self._say(label, outcome, time.monotonic())

    def _say(self, label: str, text: str, now: float) -> None:
        self._said[label] = now
        talk(f"{label}: {text}")


class LiveBars(Bars):
    """A bar a line, drawn over and over."""

    def __init__(self, labels: Sequence[str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
        from rich.table import Column

        console = Console(stderr=True, no_color="NO_COLOR" in os.environ, highlight=False)
        label, bar, said = _widths(labels, console.width)
        columns: list[ProgressColumn] = [
            # What is said may have brackets, which are no markup.
            TextColumn("{task.description}", markup=False, table_column=Column(width=label)),
            TextColumn(
                "{task.fields[said]}",
                markup=False,
                table_column=Column(width=said, no_wrap=True, overflow="ellipsis"),
            ),
        ]
        if bar:
            columns.insert(1, BarColumn(bar, table_column=Column(width=bar)))
        self._progress = Progress(*columns, console=console, refresh_per_second=10)
        self._tasks: dict[str, TaskID] = {
            label: self._progress.add_task(label, total=None, said="waiting") for label in labels
        }
        self._speeds = {label: Speed() for label in labels}
        self._progress.start()

    def step(self, label: str, phase: str, done_bytes: int, total_bytes: int) -> None:
        speed = self._speeds[label]
        speed.see(phase, done_bytes, time.monotonic())
        said = phase
        if total_bytes:
            unit = size(total_bytes)
            done = f"{done_bytes / GIB:.1f}" if unit.endswith("GiB") else size(done_bytes)
            said = f"{phase}  {done} of {unit}  {speed.sentence(total_bytes)}"
        self._progress.update(
            self._tasks[label], completed=done_bytes, total=total_bytes or None, said=said
        )

    def end(self, label: str, outcome: str) -> None:
        task = self._tasks[label]
        self._progress.update(task, completed=1, total=1, said=outcome)

    def close(self) -> None:
        self._progress.stop()


def _widths(labels: Sequence[str], columns: int) -> tuple[int, int, int]:
    """Of labels, bars and what is said, on a terminal of so many ``columns``; a bar may have none.

    Left to itself rich takes from the labels: one rank with much to say hid the numbers of all.
    """
    label = max(map(len, labels), default=0)
    least, most = _BAR_WIDTHS
    # Two columns have one space between them, three have two.
    bar = min(most, columns - label - _SAID_WIDTH - 2)
    if bar < least:
        return label, 0, max(1, columns - label - 1)
    return label, bar, columns - label - bar - 2
