"""Keeps ranks up and their descriptors alive: systemd or wcache's own, and who is asked for one.

Either is imported where it is used alone: a status has better things to do than to import both.
"""

import errno
import socket
from pathlib import Path

from wcache.paths import InstancePaths
from wcache.protocol.wire import peer_credentials
from wcache.supervise.interface import Supervisor

__all__ = ["orphans", "supervisor_for", "units_missing", "units_unused"]

# sd_booted(3).
_BOOTED = Path("/run/systemd/system")


def supervisor_for(instance: str) -> Supervisor:
    """The supervisor of ``instance`` on this machine; this is the one place that decides.

    Where systemd runs and has wcache's units it is systemd, except for ranks that wcache's own
    supervisor keeps, or left behind when it was killed: a second daemon could not have their
    sockets, and a supervisor of the same kind takes them over with their weights.
    """
    if _BOOTED.is_dir():
        from wcache.supervise.systemd.manager import (
            SystemdSupervisor,
            manager_here,
            units_installed,
        )

        manager = manager_here()
        has_units = manager is not None and units_installed(manager)
        direct = has_units and (_direct_runs(instance) or orphans(InstancePaths.of(instance)))
        if manager is not None and has_units and not direct:
            return SystemdSupervisor(instance, manager)
    from wcache.supervise.direct.client import DirectSupervisor

    return DirectSupervisor(instance)


def units_missing() -> bool:
    """True when systemd runs here and could keep ranks, if it had wcache's units."""
    from wcache.supervise.systemd.manager import manager_here, units_installed

    manager = manager_here()
    return manager is not None and not units_installed(manager)


def units_unused(supervisor: Supervisor) -> bool:
    """True when ranks stay with wcache's own supervisor although systemd has units for them."""
    from wcache.supervise.systemd.manager import manager_here, units_installed

    manager = manager_here()
    return supervisor.kind == "direct" and manager is not None and units_installed(manager)


def orphans(instance: InstancePaths) -> list[int]:
    """Ranks of a supervisor of wcache's own whose daemons outlived it."""
    from wcache.supervise.direct.record import RECORD_NAME, load_ranks

    recorded = load_ranks(instance.supervisor_folder / RECORD_NAME)
    return [rank for rank in recorded if _is_orphan(instance.rank(rank).socket)]


def _is_orphan(path: Path) -> bool:
    """True when a process listens on a rank's socket that is of no unit of wcache's.

    The record may be older than the rank's unit, whose control group then has the process.
    """
    from wcache.supervise.systemd.manager import DAEMON

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
            pid = peer_credentials(probe).pid
            group = Path(f"/proc/{pid}/cgroup").read_text()
        except OSError:
            return False  # nobody listens, or not for us
    return f"/{DAEMON}" not in group


def _direct_runs(instance: str) -> bool:
    from wcache.protocol.name import keeper

    paths = InstancePaths.of(instance)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # One that is stopped takes no more connections some day: then this does not wait for it.
        probe.setblocking(False)
        answer = probe.connect_ex(str(paths.supervisor_socket))
    return answer in (0, errno.EAGAIN) or keeper(paths) is not None
