"""How a rank's daemon and loader are run: command line, environment, log file. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wcache.paths import InstancePaths, RankId
from wcache.supervise.direct.timing import Commands
from wcache.supervise.spawn import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlans:
    """The plans of one rank's processes."""

    rank: RankId
    paths: InstancePaths
    commands: Commands
    watchdog_s: float
    """0: the daemon is not watched."""
    soft_limit: int | None
    """Open files that a loader may have at first. The supervisor's own limit is raised, and so is a
    daemon's: with more descriptors handed over than it allows, not even its libraries can be opened
    (the linker ends with EMFILE, at 1,024 again and again)."""

    def daemon(self, notify: Path, stored: Sequence[tuple[int, str]]) -> Plan:
        """``stored`` are the descriptors to hand over, by number."""
        variables = {"NOTIFY_SOCKET": str(notify)}
        own_pid = []
        if self.watchdog_s:
            variables["WATCHDOG_USEC"] = str(int(self.watchdog_s * 1e6))
            own_pid.append("WATCHDOG_PID")
        if stored:
            own_pid.append("LISTEN_PID")
        return Plan(
            command=(*self.commands.daemon, str(self.rank)),
            log=self.paths.log_file(self.rank.rank, "daemon"),
            variables=variables,
            pid_variables=own_pid,
            stored=stored,
        )

    def loader(self) -> Plan:
        return Plan(
            command=(*self.commands.loader, str(self.rank)),
            log=self.paths.log_file(self.rank.rank, "loader"),
            soft_limit=self.soft_limit,
        )
