"""Puts a supervisor of the installed wcache in the place of one of another, under its daemons.

A restart of daemons leaves wcache's own supervisor as it is: after an upgrade of the package it
would be the old one for as long as ranks are up. systemd is not wcache's to renew.
"""

import time
from collections.abc import Iterable, Mapping

import wcache
from wcache.output import Output
from wcache.paths import InstancePaths
from wcache.ranks import RankView, known_ranks, view
from wcache.supervise.direct.client import DirectSupervisor
from wcache.supervise.interface import Supervisor

_PERIOD_S = 0.05
_TAKEOVER_S = 10.0


def outdated(found: Iterable[RankView]) -> str | None:
    """The version of wcache's own supervisor where it is not the installed one, empty for one that
    does not say it; None where it is, and where no rank is up."""
    for one in found:
        if one.unit is not None and one.unit.state != "inactive":
            said = one.unit.supervisor_version
            return said if said != wcache.__version__ else None
    return None


def obstacle(found: Mapping[int, RankView]) -> str:
    """Why the supervisor can not be replaced now; empty when it can.

    Between the two the weights are held by the daemons alone: each must be there, and be able to
    hand them over.
    """
    for rank, one in found.items():
        unit = one.unit
        if unit is None or (unit.state in ("inactive", "failed") and not unit.stored_fds):
            continue
        if unit.loader == "running":
            return f"rank {rank} is loading"
        if unit.state != "active":
            return f"rank {rank} is {unit.state}"
        if one.report is None:
            return f"rank {rank} does not answer"
        if unit.stored_fds > one.report.expected_fds:
            return f"it keeps descriptors of rank {rank} that the daemon does not hand over"
    return ""


def renew(paths: InstancePaths, supervisor: Supervisor, out: Output) -> bool:
    """Replaces the supervisor where it is another wcache's; says it, and why where it can not be.

    True when it was, with all descriptors kept by the new one, or not within 10 s: what depends on
    them looks. Raises :class:`WcacheError` when the new one does not start.
    """
    if not isinstance(supervisor, DirectSupervisor):
        return False
    found = view(paths, known_ranks(paths), supervisor)
    version = outdated(found.values())
    if version is None:
        return False
    of = f"of wcache {version}" if version else "of an earlier wcache"
    if why := obstacle(found) or supervisor.replace():
        out.warn(f"the supervisor is {of}, and stays: {why}")
        return False
    out.say(f"the supervisor was {of}, and is replaced")
    deadline = time.monotonic() + _TAKEOVER_S
    while time.monotonic() < deadline:
        if all(map(_is_kept, view(paths, found, supervisor).values())):
            break
        time.sleep(_PERIOD_S)
    return True


def _is_kept(one: RankView) -> bool:
    """True when the supervisor has taken the rank's daemon over, or there is none to take over."""
    if one.report is None:
        return True
    return one.unit is not None and one.unit.state != "inactive" and not one.missing_fds
