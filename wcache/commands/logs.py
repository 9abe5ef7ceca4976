"""``wcache logs``: what daemons, loaders and the supervisor wrote, in the order of time."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal, TypeVar

import msgspec
import typer

from wcache.commands.log_entry import UNKNOWN_LEVEL, LogEntry, from_file, from_journal
from wcache.commands.options import InstanceOption
from wcache.errors import NoPermissionError, UsageError, WcacheError
from wcache.machine.permissions import who_may
from wcache.output import one_line
from wcache.paths import InstancePaths, RankId
from wcache.ranks import chosen, known_ranks, select
from wcache.streams import put

if TYPE_CHECKING:
    from wcache.supervise.systemd.journal import Part
    from wcache.supervise.systemd.manager import SystemdSupervisor

# As :mod:`wcache.log` begins its lines; they sort as text.
_TIME = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")
# The end of a file in which the last lines are looked for; a line is about 100 bytes.
_TAIL_BYTES = 4 << 20
_CHUNK_BYTES = 1 << 20
_PERIOD_S = 0.25
# Lines that a traceback may have.
_ABOVE = 200

_Log = TypeVar("_Log")


@dataclass(slots=True)
class LogFile:
    """One file that is read to its end, and on from there."""

    label: str
    path: Path
    context: LogEntry | None = None
    """Whose lines these are; what time and level the last one had."""
    offset: int = 0
    inode: int = 0
    rest: bytes = field(default=b"", repr=False)
    """An unfinished line."""

    @property
    def moved(self) -> Path:
        """Where :func:`wcache.supervise.spawn.open_log` moves what has grown large, which it does
        when a process is started: how the one before it ended is told there."""
        return self.path.with_name(f"{self.path.name}.1")

    @property
    def exists(self) -> bool:
        return self.path.exists() or self.moved.exists()

    def tail(self, count: int) -> list[bytes]:
        """The last ``count`` lines; where they end, :meth:`more` goes on."""
        lines: list[bytes] = []
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            self.inode, self.offset = status.st_ino, status.st_size
            lines = _last_lines(file, status.st_size)
            self.rest = lines.pop()
        if len(lines) < count:
            with contextlib.suppress(FileNotFoundError), self.moved.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self.inode:  # it was moved in this moment
                    lines = [*filter(None, _last_lines(file, status.st_size)), *lines]
        return lines[-count:] if count else []

    def more(self) -> list[bytes]:
        """Whole lines that were written since; a file that was replaced is read from its start."""
        left: list[bytes] = []
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self.inode or status.st_size < self.offset:
                    left = self._left()
                    self.inode, self.offset, self.rest = status.st_ino, 0, b""
                if status.st_size == self.offset:
                    return left
                file.seek(self.offset)
                data = file.read(_CHUNK_BYTES)
        except FileNotFoundError:
            return left
        self.offset += len(data)
        lines = (self.rest + data).split(b"\n")
        self.rest = lines.pop()
        return left + lines

    def _left(self) -> list[bytes]:
        """What was written to the file that is moved by now, after it was last read."""
        with contextlib.suppress(FileNotFoundError), self.moved.open("rb") as file:
            if self.inode and os.fstat(file.fileno()).st_ino == self.inode:
                file.seek(self.offset)
                return [*filter(None, (self.rest + file.read(_TAIL_BYTES)).split(b"\n"))]
        return []


def _last_lines(file: BinaryIO, end: int) -> list[bytes]:
    """Those in the last part of ``file``; the last of them is what has no end yet, or empty."""
    start = max(0, end - _TAIL_BYTES)
    file.seek(start)
    lines = file.read(end - start).split(b"\n")
    if start and len(lines) > 1:
        del lines[0]  # the read began somewhere in it
    return lines


def logs(
    ranks: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RANK]...", help="Ranks; without any, all and the supervisor."),
    ] = None,
    instance: InstanceOption = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is written from now on.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Lines of the past, in all.")
    ] = 100,
    daemon: Annotated[bool, typer.Option("--daemon", help="Only the daemons.")] = False,
    loader: Annotated[bool, typer.Option("--loader", help="Only the loaders.")] = False,
    supervisor: Annotated[bool, typer.Option("--supervisor", help="Only the supervisor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line.")] = False,
) -> None:
    """Show what daemons, loaders and the supervisor wrote.

    The logs are merged by time; each line begins with who wrote it. Under systemd they are in its
    journal, and what it says of a rank itself takes the place of the supervisor's log.
    """
    from wcache.supervise import supervisor_for
    from wcache.supervise.systemd.manager import SystemdSupervisor

    paths, named = select(instance, ranks or [])
    keeper = supervisor_for(paths.instance)
    if isinstance(keeper, SystemdSupervisor):
        asked: dict[Part, bool] = {"daemon": daemon, "loader": loader, "systemd": supervisor}
        of = [part for part, wanted in asked.items() if wanted] or list(asked)
        _journal(keeper, chosen(paths, named), of, count=lines, follow=follow, as_json=as_json)
        return
    if named and supervisor:
        raise UsageError("--supervisor belongs to no rank", hint="leave the ranks out")
    parts: list[Literal["daemon", "loader"]] = []
    parts += ["daemon"] if daemon else []
    parts += ["loader"] if loader else []
    if not parts and not supervisor:
        parts = ["daemon", "loader"]
    with_supervisor = supervisor or not (named or daemon or loader)
    try:
        shown = _logged(paths)
        if named:
            # One that has left the configuration has its logs all the same.
            shown = named if {*named} <= {*shown} else chosen(paths, named)
        files = _files(paths, shown, parts, with_supervisor=with_supervisor)
        if not follow and not any(file.exists for file in files):
            raise WcacheError(
                f"no logs{f' of {paths.instance}' if paths.instance else ''} in"
                f" {paths.state / 'log'}",
                hint="nothing was started here yet",
            )
        _show(files, lines, follow=follow, as_json=as_json)
    except PermissionError as error:
        refused = Path(error.filename)
        raise NoPermissionError(
            f"no permission to read {refused}", hint=who_may(refused, os.R_OK)
        ) from None


def _files(
    paths: InstancePaths,
    ranks: Sequence[int],
    parts: Sequence[Literal["daemon", "loader"]],
    *,
    with_supervisor: bool,
) -> list[LogFile]:
    files = [
        LogFile(f"{part}[{rank}]", paths.log_file(rank, part), _origin(paths, part, rank))
        for rank in ranks
        for part in parts
    ]
    if with_supervisor:
        log, origin = paths.supervisor_log, _origin(paths, "supervisor", None)
        files.append(LogFile("supervisor", log, origin))
    return files


def _show(files: Sequence[LogFile], lines: int, *, follow: bool, as_json: bool) -> None:
    """Raises ``PermissionError`` for the first file that may not be read."""
    written = _as_json if as_json else _as_text
    # A line without a time of its own belongs to one above it, which may not be shown.
    past = written([(file, file.tail(lines + _ABOVE if lines else 0)) for file in files])
    _write(past[-lines:] if lines else [])
    while follow:
        time.sleep(_PERIOD_S)
        _write(written([(file, file.more()) for file in files]))


def _journal(
    keeper: "SystemdSupervisor",
    ranks: Sequence[int],
    parts: "Sequence[Part]",
    *,
    count: int,
    follow: bool,
    as_json: bool,
) -> None:
    """What the journal has of ``ranks``."""
    width = len(f"systemd[{RankId(keeper.instance, max(ranks))}]")
    for line in keeper.log_lines(ranks, parts, count=count, follow=follow):
        if as_json:
            put(msgspec.json.encode(from_journal(line)).decode(), flush=follow)
            continue
        # A message may have been written by anybody who may write to the journal.
        put(f"{line.label:<{width}} | {one_line(str(line))}", flush=follow)


def _origin(
    paths: InstancePaths, part: Literal["daemon", "loader", "supervisor"], rank: int | None
) -> LogEntry:
    """What is known of a file's lines before any is read."""
    return LogEntry(
        time=None, instance=paths.instance, rank=rank, part=part, level=UNKNOWN_LEVEL, message=""
    )


def _as_text(logs: list[tuple[LogFile, list[bytes]]]) -> list[bytes]:
    return merged([(file.label, lines) for file, lines in logs])


def _as_json(logs: list[tuple[LogFile, list[bytes]]]) -> list[bytes]:
    """An object for each line, those of all files by time."""
    found = []
    for file, line in _by_time(logs):
        assert file.context is not None
        file.context = from_file(line, file.context)
        found.append(msgspec.json.encode(file.context))
    return found


def merged(logs: list[tuple[str, list[bytes]]]) -> list[bytes]:
    """Lines of all logs by time, each with its label; one without a time follows its own log."""
    width = max((len(label) for label, _ in logs), default=0)
    return [f"{label:<{width}} | ".encode() + line for label, line in _by_time(logs)]


def _by_time(logs: list[tuple[_Log, list[bytes]]]) -> list[tuple[_Log, bytes]]:
    keyed = [
        (when, index, log, line)
        for index, (log, lines) in enumerate(logs)
        for when, line in _timed(lines)
    ]
    # A stable sort: lines of one file that share a time keep their order.
    keyed.sort(key=lambda one: one[:2])
    return [(log, line) for _, _, log, line in keyed]


def _timed(lines: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    when = b""
    for line in lines:
        if match := _TIME.match(line):
            when = match[0]
        yield when, line


def _logged(paths: InstancePaths) -> list[int]:
    """Known ranks, and those that have left a log behind."""
    name = re.escape(paths.instance or "wcache")
    pattern = re.compile(rf"{name}\.(\d{{1,6}})\.(?:daemon|loader)\.log(?:\.1)?")
    folder = paths.state / "log"
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    left = {int(match[1]) for name in names if (match := pattern.fullmatch(name))}
    return sorted(left.union(known_ranks(paths)))


def _write(lines: list[bytes]) -> None:
    if not lines:
        return
    sys.stdout.buffer.write(b"\n".join(lines) + b"\n")
    sys.stdout.flush()
