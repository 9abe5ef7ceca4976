"""Keeps ranks up and their descriptors alive: wcache's own supervisor, and who is asked for one."""

from wcache.supervise.direct import DirectSupervisor
from wcache.supervise.interface import Supervisor

__all__ = ["supervisor_for"]


def supervisor_for(instance: str) -> Supervisor:
    """The supervisor of ``instance`` on this machine.

    This is the one place that decides: where ``/run/systemd/system`` exists systemd runs, and its
    units are the ones to command; as long as wcache has none, it is always its own supervisor.
    """
    return DirectSupervisor(instance)
