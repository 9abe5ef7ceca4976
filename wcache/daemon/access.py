"""Who may use the control socket, and for what. Pure but for the group's number."""

import grp
import os

from wcache.config import AccessSection
from wcache.protocol.messages import Role
from wcache.protocol.wire import Credentials


def may(peer: Credentials, access: AccessSection, role: Role) -> bool:
    """True when ``peer`` may take ``role``: root and the daemon's own user always may.

    Reading weights and writing them are different rights: a group that attaches can not put
    weights of its own in front of its members.
    """
    if peer.uid in (0, os.geteuid()) or peer.uid in access.publishers:
        return True
    if role == "loader":
        return False
    return peer.uid in access.uids or group_of(access) in (peer.gid, *peer.groups)


def may_command(peer: Credentials) -> bool:
    """True when ``peer`` may decide what is served: nobody but root and the daemon's own user."""
    return peer.uid in (0, os.geteuid())


def group_of(access: AccessSection) -> int | None:
    """The number of the group that may attach; None when there is none."""
    if access.group is None:
        return None
    try:
        return grp.getgrnam(access.group).gr_gid
    except KeyError:
        return None


def socket_mode(access: AccessSection) -> int:
    """Mode bits of the socket, so wide that whoever :func:`may` is asked about can connect."""
    if access.uids or access.publishers:
        return 0o666
    return 0o660 if access.group is not None else 0o600
