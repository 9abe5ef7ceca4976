"""What a command says: data on stdout as a table or as JSON, talk on stderr."""

import os
import sys
from collections.abc import Sequence
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING

import msgspec

from wcache.hints import for_instance
from wcache.streams import put, talk

if TYPE_CHECKING:
    from wcache.progress import Bars

GAP = "  "
NONE = "-"
_INDENT = 2 * GAP
# Columns that the last cell of a row needs to be read when it is wrapped.
MIN_SENTENCE = 24


def counted(number: int, noun: str) -> str:
    """``1 slab``, ``3 slabs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def one_line(text: str, limit: int | None = None) -> str:
    """``text`` with whatever would break a line or drive a terminal replaced, cut to ``limit``.

    Peers choose the command line that they are shown with.
    """
    line = "".join(char if char.isprintable() else " " for char in text)
    line = " ".join(line.split())
    return line if limit is None or len(line) <= limit else line[: limit - 1] + "…"


class Output:
    """Where one call of a command writes.

    stdout carries data only, so that it can be piped; everything that is said to a person goes to
    stderr. Colour is used on a terminal alone, and never under NO_COLOR (no-color.org).
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False, instance: str = "") -> None:
        self.as_json = as_json
        self.quiet = quiet
        """Say nothing but data, warnings and errors."""
        self._instance = instance
        """Which one the commands that are told are about."""

    def say(self, text: str) -> None:
        """One line for a person."""
        if not self.quiet:
            talk(for_instance(text, self._instance))

    def warn(self, text: str) -> None:
        """One line that a person must see, also when quiet."""
        talk(f"warning: {for_instance(text, self._instance)}")

    def error(self, text: str) -> None:
        """One line that says what failed, where a command goes on after it."""
        talk(f"error: {text}")

    @staticmethod
    def can_ask() -> bool:
        """True when there is somebody at a terminal."""
        return sys.stdin.isatty() and sys.stderr.isatty()

    def ask(self, question: str) -> bool:
        """True for a yes; the question goes to stderr, also when quiet."""
        talk(f"{question} [y/N] ", end="")
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def hint(self, text: str) -> None:
        """What to do about the errors before it."""
        talk(f"hint: {for_instance(text, self._instance)}")

    def data(self, value: msgspec.Struct, *tables: "Table") -> None:
        """``value`` as one JSON document, or else ``tables`` for a person; both on stdout."""
        if self.as_json:
            text = msgspec.json.format(msgspec.json.encode(value), indent=2)
            put(text.decode())
            return
        shown = [table for table in tables if table.rows]
        for index, table in enumerate(shown):
            if index:
                put("")
            table.print()

    def bars(self, labels: Sequence[str]) -> "Bars":
        """A progress bar for each of ``labels``, on stderr."""
        # rich costs 47 ms to import, and most commands draw no bar.
        from wcache.progress import Bars, LiveBars, PlainBars

        if self.quiet:
            return Bars()
        return LiveBars(labels) if sys.stderr.isatty() else PlainBars(labels)


class Table:
    """Rows under a heading; columns whose heading begins with ``>`` are flush right."""

    def __init__(self, *headings: str) -> None:
        self._right = [heading.startswith(">") for heading in headings]
        self._headings = [heading.removeprefix(">") for heading in headings]
        self.rows: list[tuple[str, ...]] = []

    def add(self, *cells: object) -> None:
        """``None`` is shown as :data:`NONE`."""
        self.rows.append(tuple(NONE if cell is None else one_line(str(cell)) for cell in cells))

    def print(self) -> None:
        """On a terminal fitted to its width, otherwise one full line a row."""
        width = get_terminal_size().columns if sys.stdout.isatty() else None
        if width is None:
            put("\n".join(self.lines()))
        elif self._leaves_room(width):
            self._print_fitted()
        else:
            put("\n".join(self.stacked(width)))

    def _leaves_room(self, width: int) -> bool:
        """True when sentences can be wrapped beside the other cells."""
        widths = [max(map(len, column)) for column in zip(*self._grid, strict=True)]
        return sum(widths[:-1]) + len(GAP) * (len(widths) - 1) + MIN_SENTENCE <= width

    def stacked(self, width: int) -> list[str]:
        """The layout for a terminal that is too narrow: the last cell below the others.

        The terminal would break lines anywhere, and the next row could not be found.
        """
        whole = self.lines()
        if max(map(len, whole)) <= width:
            return whole
        found: list[str] = []
        others = self.lines(len(self._headings) - 1)
        if max(map(len, others)) > width:
            others = self.lines(len(self._headings) - 1, gap=" ")
        for line, cells in zip(others, self._grid, strict=True):
            found += _wrapped(line, width, "")
            if cells[-1] != NONE:
                found += _wrapped(cells[-1], width, _INDENT)
        return found

    def lines(self, columns: int | None = None, *, gap: str = GAP) -> list[str]:
        """The plain layout, of the first ``columns`` or of all: nothing is cut off or wrapped,
        nothing but spaces between columns."""
        grid = [cells[:columns] for cells in self._grid]
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        return [
            gap.join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, self._right, strict=False)
            ).rstrip()
            for row in grid
        ]

    @property
    def _grid(self) -> list[tuple[str, ...]]:
        return [tuple(self._headings), *self.rows]

    def _print_fitted(self) -> None:
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        fitted = RichTable(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0))
        last = len(self._headings) - 1
        for index, (heading, right) in enumerate(zip(self._headings, self._right, strict=True)):
            # Only the last column holds sentences; the others are read at a glance or not at all.
            fitted.add_column(
                heading, justify="right" if right else "left", no_wrap=index != last,
                overflow="fold",
            )  # fmt: skip
        for row in self.rows:
            fitted.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in row))
        Console(no_color="NO_COLOR" in os.environ, highlight=False).print(fitted)


def _wrapped(text: str, width: int, first: str) -> list[str]:
    """Lines of at most ``width``; what a person may copy is not cut at its hyphens."""
    return wrap(
        text, width, initial_indent=first, subsequent_indent=_INDENT, break_on_hyphens=False
    )


COLOURS = {
    "ready": "green",
    "ok": "green",
    "loading": "yellow",
    "staging": "yellow",
    "warn": "yellow",
    "warning": "yellow",
    "skipped": "yellow",
    "failed": "bold red",
    "bad": "bold red",
    "fail": "bold red",
    "silent": "bold red",
}
