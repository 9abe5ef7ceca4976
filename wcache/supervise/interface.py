"""What a supervisor of ranks does, whichever it is: systemd, or wcache's own."""

from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec

UnitState = Literal["inactive", "starting", "active", "restarting", "stopping", "failed"]
LoaderState = Literal["inactive", "running", "failed"]


class UnitReport(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as its supervisor sees it."""

    rank: int
    state: UnitState = "inactive"
    main_pid: int = 0
    restarts: int = 0
    """Automatic ones, since the rank was last started by a command."""
    stored_fds: int = 0
    status: str = ""
    """The daemon's last STATUS= sentence; kept after it ended."""
    result: str = ""
    """How the daemon last ended: ``exit 78``, ``signal KILL``, ``watchdog``; empty for well."""
    since: float = 0.0
    """Unix time of the last change of ``state``."""
    loader: LoaderState = "inactive"
    loader_pid: int = 0
    loader_result: str = ""
    fault: str = ""
    """Why it could not be started again, whatever it does now; empty when it could."""
    mend: str = ""
    """The command against ``fault``."""
    boots: bool | None = None
    """True when the next boot starts it; None where no boot starts anything."""
    max_fds: int | None = None
    """How many descriptors may be stored; None where no number is set, and without a daemon."""
    supervisor_version: str = ""
    """Of the wcache that a supervisor of wcache's own runs; empty for one that is too old to say,
    for a rank that it has not started, and for systemd."""


class Supervisor(Protocol):
    """Starts and stops the ranks of one instance. Every call raises ``WcacheError`` on failure."""

    kind: Literal["direct", "systemd"]

    def show(self, ranks: Iterable[int]) -> dict[int, UnitReport]:
        """Reports every rank of ``ranks``; one that is unknown is ``inactive``."""

    def start(self, ranks: Iterable[int]) -> None:
        """Starts ranks that are not up, each with its loader beside it; returns at once."""

    def load(self, ranks: Iterable[int]) -> None:
        """Runs the loader of ranks that are up; it exits at once when nothing is to be loaded."""

    def restart(self, ranks: Iterable[int]) -> None:
        """Restarts daemons; the stored descriptors, and so the weights, are kept."""

    def stop(self, ranks: Iterable[int]) -> None:
        """Stops daemons and waits for their end; their stored descriptors are dropped."""

    def shutdown(self) -> None:
        """Stops every rank, and ends the supervisor where it is wcache's own."""

    def enable(self, ranks: Iterable[int]) -> None:
        """Has the next boot start ``ranks``, where the supervisor is one that a boot starts."""

    def disable(self, ranks: Iterable[int]) -> None:
        """Undoes :meth:`enable`; what runs goes on."""
