"""``wcache logs``: what daemons, loaders and the supervisor wrote, in the order of time."""

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
import typer

from wcache.commands.log_entry import UNKNOWN_LEVEL, LogEntry, from_file, from_journal
from wcache.commands.options import InstanceOption
from wcache.errors import NoPermissionError, UsageError, WcacheError
from wcache.output import one_line
from wcache.paths import InstancePaths, RankId
from wcache.permissions import who_may
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

    def tail(self, count: int) -> list[bytes]:
        """The last ``count`` lines; where they end, :meth:`more` goes on."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                self.inode, self.offset = status.st_ino, status.st_size
                start = max(0, status.st_size - _TAIL_BYTES)
                file.seek(start)
                data = file.read(status.st_size - start)
        except FileNotFoundError:
            return []
        lines = data.split(b"\n")
        self.rest = lines.pop()
        if start and lines:
            del lines[0]  # the read began somewhere in it
        return lines[-count:] if count else []

    def more(self) -> list[bytes]:
        """Whole lines that were written since; a file that was replaced is read from its start."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self.inode or status.st_size < self.offset:
                    self.inode, self.offset, self.rest = status.st_ino, 0, b""
                if status.st_size == self.offset:
                    return []
                file.seek(self.offset)
                data = file.read(_CHUNK_BYTES)
        except FileNotFoundError:
            return []
        self.offset += len(data)
        lines = (self.rest + data).split(b"\n")
        self.rest = lines.pop()
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
        shown = chosen(paths, named) if named else _logged(paths)
        files = _files(paths, shown, parts, with_supervisor=with_supervisor)
        if not follow and not any(file.path.exists() for file in files):
            raise WcacheError(
                f"no logs in {paths.state / 'log'}",
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
    pattern = re.compile(rf"{name}\.(\d{{1,6}})\.(?:daemon|loader)\.log")
    folder = paths.state / "log"
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    left = {int(match[1]) for name in names if (match := pattern.fullmatch(name))}
    return sorted(left.union(known_ranks(paths)))


def _write(lines: list[bytes]) -> None:
    if not lines:
        return
    sys.stdout.buffer.write(b"\n".join(lines) + b"\n")
    sys.stdout.flush()
