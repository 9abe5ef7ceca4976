"""Keeps ranks up and their descriptors alive: systemd or wcache's own, and who is asked for one."""

import socket

from wcache.paths import InstancePaths
from wcache.supervise.direct import DirectSupervisor
from wcache.supervise.interface import Supervisor
from wcache.supervise.systemd import SystemdSupervisor, manager_here, units_installed

__all__ = ["supervisor_for", "units_missing"]


def supervisor_for(instance: str) -> Supervisor:
    """The supervisor of ``instance`` on this machine; this is the one place that decides.

    Where systemd runs and has wcache's units it is systemd, except for ranks that wcache's own
    supervisor keeps at this moment: a second daemon could not have their sockets.
    """
    manager = manager_here()
    if manager is None or not units_installed(manager) or _direct_runs(instance):
        return DirectSupervisor(instance)
    return SystemdSupervisor(instance, manager)


def units_missing() -> bool:
    """True when systemd runs here and could keep ranks, if it had wcache's units."""
    manager = manager_here()
    return manager is not None and not units_installed(manager)


def _direct_runs(instance: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(InstancePaths.of(instance).supervisor_socket)) == 0
