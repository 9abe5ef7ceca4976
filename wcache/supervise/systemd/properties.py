"""A rank's units in the words of ``systemctl show``, and what they come to. Pure."""

import os
import time
from dataclasses import dataclass

from wcache.supervise.interface import LoaderState, UnitReport, UnitState
from wcache.supervise.spawn import Ending

# Those that an older systemd does not know are left out of its answer.
NAMES = (
    "Id", "LoadState", "ActiveState", "SubState", "Result", "StatusText", "MainPID", "NRestarts",
    "NFileDescriptorStore", "ExecMainCode", "ExecMainStatus", "StateChangeTimestampMonotonic",
    "Job", "UnitFileState", "FileDescriptorStoreMax",
)  # fmt: skip

_STATES: dict[str, UnitState] = {
    "active": "active",
    "reloading": "active",
    "activating": "starting",
    "deactivating": "stopping",
    "failed": "failed",
}
# Results of systemd.exec(5) that are no ending of the process itself.
_RESULTS = {
    "watchdog": "watchdog",
    "timeout": "timeout",
    "oom-kill": "out of memory",
    "start-limit-hit": "start limit hit",
}
START_LIMIT = "start-limit-hit"

_UNKNOWN = Ending()


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitProperties:
    """One unit; a unit of which nothing was said is an inactive one."""

    id: str
    load_state: str = "loaded"
    """``loaded``, ``not-found``, ``masked``, ``bad-setting`` or ``error``."""
    active_state: str = "inactive"
    sub_state: str = "dead"
    result: str = "success"
    status: str = ""
    main_pid: int = 0
    restarts: int = 0
    stored_fds: int = 0
    max_fds: int = 0
    ending: Ending = _UNKNOWN
    """Of the last main process."""
    changed_us: int = 0
    """CLOCK_MONOTONIC of the last change of ``active_state``; 0 when there was none."""
    has_job: bool = False
    """A start or a stop is queued or under way."""
    file_state: str = ""
    """``enabled`` when the next boot starts it."""

    @property
    def is_settled(self) -> bool:
        """True when it is down, and nothing is about to change that."""
        return self.active_state in ("inactive", "failed") and not self.has_job

    @property
    def state(self) -> UnitState:
        # Newer ones say auto-restart-queued as well.
        if self.sub_state.startswith("auto-restart"):
            return "restarting"
        if self.active_state == "inactive" and self.has_job:
            return "starting"
        return _STATES.get(self.active_state, "inactive")

    @property
    def loader_state(self) -> LoaderState:
        state = self.state
        if state in ("inactive", "failed"):
            return "failed" if state == "failed" else "inactive"
        return "running"

    @property
    def ended(self) -> str:
        """How it last ended: ``exit 78``, ``signal KILL``, ``watchdog``; empty for well."""
        if self.result == "success":
            # A daemon that ended without being asked to.
            return str(self.ending) if self.state == "restarting" else ""
        if self.result in _RESULTS:
            return _RESULTS[self.result]
        known = self.ending.code is not None or self.ending.signal is not None
        return self.result if self.ending.is_clean or not known else str(self.ending)


def parse(text: str) -> dict[str, UnitProperties]:
    """The output of ``show`` over several units, by their names."""
    found = {}
    for block in text.split("\n\n"):
        said = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" in said:
            found[said["Id"]] = _properties(said)
    return found


def _properties(said: dict[str, str]) -> UnitProperties:
    return UnitProperties(
        id=said["Id"],
        load_state=said.get("LoadState", ""),
        active_state=said.get("ActiveState", ""),
        sub_state=said.get("SubState", ""),
        result=said.get("Result", ""),
        status=said.get("StatusText", ""),
        main_pid=_number(said.get("MainPID")),
        restarts=_number(said.get("NRestarts")),
        stored_fds=_number(said.get("NFileDescriptorStore")),
        max_fds=_number(said.get("FileDescriptorStoreMax")),
        ending=_ending(_number(said.get("ExecMainCode")), _number(said.get("ExecMainStatus"))),
        changed_us=_number(said.get("StateChangeTimestampMonotonic")),
        has_job=said.get("Job", "") not in ("", "0"),
        file_state=said.get("UnitFileState", ""),
    )


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0


def _ending(code: int, status: int) -> Ending:
    """From waitid(2)'s ``si_code`` and ``si_status``."""
    if code == os.CLD_EXITED:
        return Ending(code=status)
    if code in (os.CLD_KILLED, os.CLD_DUMPED):
        return Ending(signal=status)
    return _UNKNOWN


def unit_report(rank: int, daemon: UnitProperties, loader: UnitProperties) -> UnitReport:
    since = 0.0
    if daemon.changed_us:
        since = time.time() - (time.monotonic() - daemon.changed_us / 1e6)
    fault, mend = unusable(daemon) or ("", "")
    return UnitReport(
        rank=rank,
        state=daemon.state,
        main_pid=daemon.main_pid,
        restarts=daemon.restarts,
        stored_fds=daemon.stored_fds,
        status=daemon.status,
        result=daemon.ended,
        since=since,
        loader=loader.loader_state,
        loader_pid=loader.main_pid,
        loader_result=loader.ended if loader.loader_state == "failed" else "",
        fault=fault,
        mend=mend,
        boots=daemon.file_state == "enabled",
        max_fds=daemon.max_fds if daemon.main_pid else None,
    )


def unusable(unit: UnitProperties) -> tuple[str, str] | None:
    """Why systemd can not run ``unit``, and what to do about it; None when it can."""
    match unit.load_state:
        case "loaded" if unit.result == START_LIMIT:
            said = f"{unit.id} was started too often and is not started any more (start limit)"
            return said, f"wcache up starts it again, systemctl reset-failed {unit.id} allows it"
        case "loaded":
            return None
        case "masked":
            return f"{unit.id} is masked", f"systemctl unmask {unit.id}"
        case "not-found":
            return f"{unit.id} is not installed", "wcache install"
        case other:
            return f"{unit.id} can not be used ({other})", f"systemd-analyze verify {unit.id}"
