"""Who may do what on a rank's socket."""

import grp
import os

import pytest

from wcache.config import AccessSection
from wcache.daemon.access import group_of, may, may_command, socket_mode
from wcache.protocol.messages import Role
from wcache.protocol.wire import Credentials

pytestmark = pytest.mark.unit

GROUP = grp.getgrgid(1)
OTHER = 54321
ROLES: list[Role] = ["client", "loader", "operator"]


def peer(uid: int = OTHER, gid: int = OTHER, groups: tuple[int, ...] = ()) -> Credentials:
    return Credentials(pid=1, uid=uid, gid=gid, groups=groups)


@pytest.mark.parametrize("uid", [0, os.geteuid()])
@pytest.mark.parametrize("role", ROLES)
def test_root_and_the_daemons_own_user_may_everything(uid: int, role: Role) -> None:
    assert may(peer(uid), AccessSection(), role)


@pytest.mark.parametrize("role", ROLES)
def test_nobody_else_may_anything_by_default(role: Role) -> None:
    assert not may(peer(), AccessSection(), role)
    assert not may(peer(gid=0, groups=(0, 1)), AccessSection(), role)


@pytest.mark.parametrize(
    "member", [peer(gid=GROUP.gr_gid), peer(groups=(7, GROUP.gr_gid))], ids=["primary", "further"]
)
def test_members_of_the_group_may_read_and_not_write(member: Credentials) -> None:
    access = AccessSection(group=GROUP.gr_name)
    assert may(member, access, "client")
    assert may(member, access, "operator")
    assert not may(member, access, "loader")
    assert not may(peer(), access, "client")


def test_listed_users_may_read_and_listed_publishers_write_too() -> None:
    access = AccessSection(uids=(OTHER,), publishers=(OTHER + 1,))
    assert may(peer(OTHER), access, "client")
    assert not may(peer(OTHER), access, "loader")
    assert may(peer(OTHER + 1), access, "loader")
    assert may(peer(OTHER + 1), access, "client")
    assert not may(peer(OTHER + 2), access, "client")


def test_nobody_but_root_and_the_daemons_own_user_decides_what_is_served() -> None:
    assert may_command(peer(0))
    assert may_command(peer(os.geteuid()))
    assert not may_command(peer(OTHER))


def test_group_that_was_deleted_lets_nobody_in() -> None:
    access = AccessSection(group="no-such-group-here")
    assert group_of(access) is None
    assert not may(peer(), access, "client")


def test_socket_is_no_wider_than_its_users_need() -> None:
    assert socket_mode(AccessSection()) == 0o600
    assert socket_mode(AccessSection(group=GROUP.gr_name)) == 0o660
    assert socket_mode(AccessSection(group=GROUP.gr_name, uids=(OTHER,))) == 0o666
