"""systemd as the supervisor: the only module that calls systemctl and journalctl."""

import os
import re
import subprocess
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal

from wcache.errors import NoPermissionError, TryAgainError, UsageError, WcacheError
from wcache.paths import RankId, config_folder, run_folder
from wcache.supervise.interface import UnitReport
from wcache.supervise.spawn import clean_environment
from wcache.supervise.systemd.journal import FIELDS, LogLine, Part, log_line
from wcache.supervise.systemd.properties import (
    NAMES,
    START_LIMIT,
    UnitProperties,
    parse,
    unit_report,
    unusable,
)

Manager = Literal["system", "user"]

DAEMON, LOADER, TARGET = "wcache@", "wcache-load@", "wcache.target"
_SUFFIX = ".service"
CALL_TIMEOUT_S = 30.0
# TimeoutStopSec= of the units, and what comes before and after it.
STOP_TIMEOUT_S = 60.0
_PERIOD_S = 0.05
_MAX_ENTRY_BYTES = 1 << 20
_DENIED = ("access denied", "interactive authentication required", "permission denied")

_SYSTEM_FOLDERS = (
    "/etc/systemd/system", "/run/systemd/system", "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system", "/lib/systemd/system",
)  # fmt: skip
_USER_FOLDERS = (
    "/etc/systemd/user", "/run/systemd/user", "/usr/local/lib/systemd/user",
    "/usr/lib/systemd/user",
)  # fmt: skip


def manager_here() -> Manager | None:
    """The manager whose units use the same folders as this process; None when there is none.

    Units know nothing of WCACHE_RUN_DIR and WCACHE_CONFIG_DIR in an operator's shell: where these
    name other folders than theirs, the units are not what is meant.
    """
    if not is_running(user=False):
        return None
    if run_folder() == Path("/run/wcache"):
        return "system" if config_folder() == Path("/etc/wcache") else None
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if os.geteuid() == 0 or not runtime or run_folder() != Path(runtime) / "wcache":
        return None
    return "user" if is_running(user=True) else None


def units_installed(manager: Manager) -> bool:
    """True when ``manager`` finds the daemon's unit; a masked one is found too."""
    name = f"{DAEMON}{_SUFFIX}"
    if manager == "system":
        return any(os.path.lexists(f"{folder}/{name}") for folder in _SYSTEM_FOLDERS)
    config = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local/share")
    folders = (f"{config}/systemd/user", f"{data}/systemd/user", *_USER_FOLDERS)
    return any(os.path.lexists(f"{folder}/{name}") for folder in folders)


def is_running(*, user: bool) -> bool:
    """True when the manager takes commands of this process's user."""
    if not user:
        return Path("/run/systemd/system").is_dir()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return runtime is not None and Path(runtime, "systemd", "private").exists()


def reload(*, user: bool) -> None:
    """Has the manager read its units again; what they run goes on. Raises :class:`WcacheError`."""
    _systemctl("user" if user else "system", "daemon-reload")


def version() -> int:
    """The number of the systemd that is installed; 0 when none is, or it does not say."""
    try:
        said = _systemctl("system", "--version")
    except WcacheError:
        return 0
    match = re.match(r"systemd (\d{1,5})\b", said)
    return int(match[1]) if match else 0


class SystemdSupervisor:
    """Commands for the ranks of ``instance``, each of which is two units of ``manager``."""

    kind: Literal["direct", "systemd"] = "systemd"

    def __init__(self, instance: str, manager: Manager = "system") -> None:
        self.instance = instance
        self._manager: Manager = manager

    # --- what a supervisor does -----------------------------------------------------------------

    def show(self, ranks: Iterable[int]) -> dict[int, UnitReport]:
        wanted = list(ranks)
        units = self._show([*map(self._daemon, wanted), *map(self._loader, wanted)])
        return {
            rank: unit_report(rank, units[self._daemon(rank)], units[self._loader(rank)])
            for rank in wanted
        }

    def start(self, ranks: Iterable[int]) -> None:
        """The daemon's unit wants the loader's.

        A start limit is for what starts by itself: a command that was given counts anew.
        """
        units = [self._daemon(rank) for rank in ranks]
        limited = [unit.id for unit in self._show(units).values() if unit.result == START_LIMIT]
        if limited:
            self._do("reset-failed", *limited)
        self._begin("start", units)

    def load(self, ranks: Iterable[int]) -> None:
        """Restarts the loaders, for a start would be nothing to one that is about to end."""
        wanted = list(ranks)
        for rank, unit in self.show(wanted).items():
            if unit.state in ("inactive", "failed"):
                raise TryAgainError(
                    f"rank {RankId(self.instance, rank)} is not up", hint="wcache up starts it"
                )
        self._begin("restart", [self._loader(rank) for rank in wanted])

    def restart(self, ranks: Iterable[int]) -> None:
        """One restart and never a stop and a start, between which descriptors would be dropped."""
        self._begin("restart", [self._daemon(rank) for rank in ranks])

    def stop(self, ranks: Iterable[int]) -> None:
        wanted = list(ranks)
        units = [*map(self._daemon, wanted), *map(self._loader, wanted)]
        if not units:
            return
        self._do("stop", "--no-block", *units)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while left := [unit for unit in self._show(units).values() if not unit.is_settled]:
            if time.monotonic() > deadline:
                raise WcacheError(
                    f"{left[0].id} does not stop within {STOP_TIMEOUT_S:g} s",
                    hint=f"systemctl status {left[0].id} shows why",
                )
            time.sleep(_PERIOD_S)
        ended = self._show(units).values()
        # What has failed before or at its end is down by command now, and not to be seen to.
        if failed := [unit.id for unit in ended if unit.active_state == "failed"]:
            self._do("reset-failed", *failed)
        # FileDescriptorStorePreserve=yes is there for systemctl stop and start.
        if kept := [unit.id for unit in ended if unit.stored_fds]:
            self._do("clean", "--what=fdstore", *kept)

    def shutdown(self) -> None:
        """Stops every rank; systemd stays."""
        self.stop(self.known_ranks())

    def enable(self, ranks: Iterable[int]) -> None:
        units = [self._daemon(rank) for rank in ranks]
        if not units:
            return
        found = self._show([*units, TARGET])
        off = [unit.id for unit in found.values() if unit.file_state != "enabled"]
        if not off:
            return
        self._do("enable", *off)
        still = [unit for unit in self._show(off).values() if unit.file_state != "enabled"]
        if still:
            raise WcacheError(
                f"{still[0].id} is {still[0].file_state or 'not enabled'}: a reboot will not start"
                " it",
                hint=f"systemctl enable {still[0].id} says why",
            )

    def disable(self, ranks: Iterable[int]) -> None:
        units = [self._daemon(rank) for rank in ranks]
        on = [unit.id for unit in self._show(units).values() if unit.file_state == "enabled"]
        if on:
            self._do("disable", *on)

    # --- the journal ----------------------------------------------------------------------------

    def log_lines(
        self, ranks: Iterable[int], parts: Iterable[Part], *, count: int, follow: bool = False
    ) -> Iterator[LogLine]:
        """The last ``count`` lines of ``ranks`` in the order of time, and those to come."""
        matches = self._matches(tuple(ranks), set(parts))
        if not matches:
            return
        arguments = [f"--lines={count}", *(["--follow"] if follow else []), *matches]
        with closing(_journal(arguments)) as entries:
            for entry in entries:
                line = log_line(entry, DAEMON, LOADER)
                if line is not None:
                    yield line

    def _matches(self, ranks: Sequence[int], parts: set[Part]) -> list[str]:
        """Of journalctl(1): those of one field are alternatives, as are groups around a ``+``."""
        daemons, loaders = [*map(self._daemon, ranks)], [*map(self._loader, ranks)]
        own, about = "_SYSTEMD_UNIT", "UNIT"
        # Anybody may write about a unit; the manager itself is told by what it can not forge.
        manager = "_PID=1"
        if self._manager == "user":
            own, about, manager = "_SYSTEMD_USER_UNIT", "USER_UNIT", f"_UID={os.geteuid()}"
        written_by = [
            *(daemons if "daemon" in parts else ()),
            *(loaders if "loader" in parts else ()),
        ]
        groups = [[f"{own}={unit}" for unit in written_by]] if written_by else []
        if "systemd" in parts and ranks:
            groups.append([manager, *(f"{about}={unit}" for unit in daemons + loaders)])
        return [word for group in groups for word in ("+", *group)][1:]

    # --- inside ---------------------------------------------------------------------------------

    # systemd.unit(5) takes a colon, and all that an instance's name may have, as they are.

    def _daemon(self, rank: int) -> str:
        return f"{DAEMON}{RankId(self.instance, rank)}{_SUFFIX}"

    def _loader(self, rank: int) -> str:
        return f"{LOADER}{RankId(self.instance, rank)}{_SUFFIX}"

    def known_ranks(self) -> list[int]:
        """Ranks of the instance that systemd has loaded units of."""
        answer = self._do("show", "--property=Id", f"{DAEMON}*{_SUFFIX}", f"{LOADER}*{_SUFFIX}")
        ranks = set()
        for name in parse(answer):
            try:
                found = RankId.parse(name.partition("@")[2].removesuffix(_SUFFIX))
            except UsageError:
                continue
            if found.instance == self.instance:
                ranks.add(found.rank)
        return sorted(ranks)

    def _show(self, units: Sequence[str]) -> dict[str, UnitProperties]:
        if not units:
            return {}
        found = parse(self._do("show", f"--property={','.join(NAMES)}", "--", *units))
        return {name: found.get(name, UnitProperties(id=name)) for name in units}

    def _begin(self, verb: str, units: Sequence[str]) -> None:
        """Queues jobs; whether they succeed is seen by :meth:`show`."""
        if not units:
            return
        try:
            self._do(verb, "--no-block", *units)
        except NoPermissionError:
            raise
        except WcacheError:
            # systemctl goes on after a unit that it could not queue, and does not say it so that
            # it could be told which: the units are asked.
            for unit in self._show(units).values():
                if (why := unusable(unit)) is not None:
                    raise WcacheError(why[0], hint=why[1]) from None
            raise

    def _do(self, *arguments: str) -> str:
        return _systemctl(self._manager, *arguments)


def _systemctl(manager: Manager, *arguments: str) -> str:
    """One call; returns its stdout, raises :class:`WcacheError` with its words."""
    user = ("--user",) if manager == "user" else ()
    command = ["systemctl", *user, "--no-pager", "--no-ask-password", *arguments]
    try:
        done = subprocess.run(
            command, env=_environment(), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=CALL_TIMEOUT_S, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise WcacheError("systemctl is not installed") from None
    except subprocess.TimeoutExpired:
        raise WcacheError(f"systemd does not answer within {CALL_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise _failure(done.stderr)
    return done.stdout


def _environment() -> dict[str, str]:
    return clean_environment() | {"LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}


def _failure(stderr: str) -> WcacheError:
    said = next((line.strip() for line in stderr.splitlines() if line.strip()), "it said nothing")
    if any(word in stderr.lower() for word in _DENIED):
        return NoPermissionError(f"systemd refuses: {said}")
    return WcacheError(f"systemd refuses: {said}")


def _journal(arguments: Sequence[str]) -> Generator[bytes, None, None]:
    """Entries as JSON, one a line; the process that reads them ends with the iterator."""
    command = [
        "journalctl", "--no-pager", "--quiet", "--output=json",
        f"--output-fields={','.join(FIELDS)}", *arguments,
    ]  # fmt: skip
    try:
        process = subprocess.Popen(
            command, env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
    except FileNotFoundError:
        raise WcacheError("journalctl is not installed") from None
    assert process.stdout
    assert process.stderr
    try:
        while line := process.stdout.readline(_MAX_ENTRY_BYTES):
            yield line
        if process.wait(CALL_TIMEOUT_S):
            raise _failure(process.stderr.read(4096).decode(errors="replace"))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
