"""Checks of the service manager: its version, its units, the group, the socket's folders."""

import grp
import os
import pwd
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from wcache.daemon.access import group_of, socket_mode
from wcache.doctor.evidence import Evidence, Manager
from wcache.doctor.finding import Finding, fail, ok, warn
from wcache.doctor.unseen import INSIDE, unseen
from wcache.install import Planned, is_ours, read_installed
from wcache.machine.permissions import who_may
from wcache.ranks import rank_words
from wcache.supervise.systemd.manager import DAEMON

GROUP = "wcache"
KEEPS_OVER_STOP = 254
_SHOWN = 5
_EXEC = re.compile(rb"^ExecStart=(?P<python>/\S+) .*-m wcache\.", re.MULTILINE)


def check_systemd(evidence: Evidence) -> Iterator[Finding]:
    version = evidence.manager.version
    if not version:
        yield ok("systemd", "none runs here: wcache up starts a supervisor of its own")
    elif version >= KEEPS_OVER_STOP:
        yield ok("systemd", f"{version}: weights are kept over restart, crash and stop")
    else:
        yield ok(
            "systemd",
            f"{version}: weights are kept over restart and crash; stop frees them"
            f" ({KEEPS_OVER_STOP} and newer keep them)",
        )


def check_linger(evidence: Evidence) -> Iterator[Finding]:
    """A user's manager ends with the last session unless the user lingers (loginctl(1))."""
    manager = evidence.manager
    if not manager.is_running or not manager.target.is_user:
        return
    name = pwd.getpwuid(os.getuid()).pw_name
    if (evidence.machine.linger / name).exists():
        yield ok("linger", f"the manager of {name} runs from boot on, without a session")
    else:
        yield warn(
            "linger", "your manager ends with your last session, and the weights with it",
            "loginctl enable-linger",
        )  # fmt: skip


def check_boot(evidence: Evidence) -> Iterator[Finding]:
    """Whether a reboot brings back what is up; where no units are, that is said of these."""
    manager, config = evidence.manager, evidence.config
    if not manager.is_running or not os.path.lexists(manager.target.units / f"{DAEMON}.service"):
        return
    local = config.ranks.local_ranks() if config else ()
    up = {rank: one for rank in local if (one := evidence.views.get(rank)) and one.is_up}
    off = [rank for rank, one in up.items() if one.unit and one.unit.boots is False]
    if up and evidence.supervisor == "direct":
        yield warn(
            "boot",
            f"{rank_words(up)} {'is' if len(up) == 1 else 'are'} kept by wcache's own supervisor,"
            " which no boot starts",
            "wcache down, then wcache up, which loads them anew: systemd keeps them then",
        )
    elif off:
        yield warn("boot", f"a reboot does not start {rank_words(off)}",
                   "wcache up enables it")  # fmt: skip
    elif up:
        yield ok("boot", "a reboot loads the same weights again")


def check_units(evidence: Evidence, planned: list[Planned]) -> Iterator[Finding]:
    """``planned`` are the files as :func:`wcache.install.plan` would have them."""
    manager = evidence.manager
    if not manager.is_running:
        return
    by_state: dict[str, list[Path]] = {}
    for one in planned:
        by_state.setdefault(one.state(), []).append(one.path)
    absent = by_state.get("absent", [])
    if len(absent) == len(planned):
        yield warn("units", "not installed: a reboot brings no weights back", manager.install)
        return
    found = list(_unit_problems(manager, by_state))
    found += _overridden(manager, planned)
    found += _interpreters(manager, planned)
    yield from found or [ok("units", f"{len(planned)} files as shipped in {manager.target.units}")]


def check_group(evidence: Evidence) -> Iterator[Finding]:
    """The group that sysusers.d makes; one of the configuration is checked with that."""
    if not evidence.manager.is_running or evidence.manager.target.is_user:
        return
    try:
        number = grp.getgrnam(GROUP).gr_gid
    except KeyError:
        yield warn("group", f"there is no group {GROUP} to give access to", f"groupadd -r {GROUP}")
        return
    yield ok("group", f"{GROUP} has number {number}")


def check_folders(evidence: Evidence) -> Iterator[Finding]:
    """Who could put a socket of his own in a rank's place, and who can not get to it."""
    run = evidence.instance.run
    try:
        if not run.is_dir():
            yield ok("sockets", f"{run} is not there yet")
            return
    except PermissionError:
        yield unseen(evidence, "sockets", run)
        return
    if who_may(run, INSIDE):
        yield unseen(evidence, "sockets", run)
        return
    folders = [evidence.instance.rank(rank).folder for rank in evidence.views]
    found = list(_folder_problems(evidence, [run, *(path for path in folders if path.is_dir())]))
    found += _socket_problems(evidence)
    yield from found or [ok("sockets", f"{run} is safe, and open to those who may attach")]


def _unit_problems(manager: Manager, by_state: dict[str, list[Path]]) -> Iterator[Finding]:
    if absent := by_state.get("absent"):
        yield fail("units", f"missing: {_names(absent)}", manager.install)
    if outdated := by_state.get("outdated"):
        yield warn("units", f"of another wcache or python: {_names(outdated)}", manager.install)
    for path in by_state.get("edited", []):
        if path.is_symlink():
            yield fail("units", f"{path} leads elsewhere: masked?", f"rm {path}; {manager.install}")
        else:
            yield warn("units", f"edited by hand: {path}", f"mv {path} /root; {manager.install}")


def _overridden(manager: Manager, planned: list[Planned]) -> Iterator[Finding]:
    """Units of the operator's that stand in front of the installed ones."""
    for one in planned:
        if one.path.parent != manager.target.units:
            continue
        for folder in manager.overrides:
            path = folder / one.path.name
            if path.is_symlink() and path.resolve() == Path(os.devnull):
                mend = f"{manager.systemctl} unmask {path.name}"
                yield fail("units", f"{path.name} is masked by {path}", mend)
            elif path.exists() and not path.samefile(one.path):
                mend = f"{manager.systemctl} revert {path.name}"
                yield warn("units", f"{path} goes before the shipped {path.name}", mend)


def _interpreters(manager: Manager, planned: list[Planned]) -> Iterator[Finding]:
    """Interpreters that installed units name and that are gone, as after a moved environment."""
    gone: dict[Path, list[Path]] = {}
    for one in planned:
        data = read_installed(one.path) or b""
        if is_ours(data) and (match := _EXEC.search(data)):
            python = Path(os.fsdecode(match["python"]))
            if not os.access(python, os.X_OK):
                gone.setdefault(python, []).append(one.path)
    for python, paths in gone.items():
        yield fail("units", f"{_names(paths)} start {python}, which is gone", manager.install)


def _folder_problems(evidence: Evidence, folders: list[Path]) -> Iterator[Finding]:
    access = evidence.config.access if evidence.config else None
    shared = access is not None and (access.group or access.uids or access.publishers)
    for path in folders:
        status = path.stat()
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid not in (0, os.geteuid()):
            yield fail(
                "sockets",
                f"{path} belongs to uid {status.st_uid}, who could serve weights of his own",
                # In a run folder of his own there may be live ranks of his.
                "set WCACHE_RUN_DIR to a folder of yours"
                if path == evidence.instance.run
                else f"wcache down; rm -r {path}",
            )
        elif mode & (stat.S_IWGRP | stat.S_IWOTH):
            yield fail(
                "sockets",
                f"{path} has mode {mode:o}: others could serve weights of their own",
                f"chmod go-w {path}",
            )
        elif shared and not mode & stat.S_IXOTH:
            yield fail(
                "sockets",
                f"{path} has mode {mode:o}: those who may attach can not get to the socket",
                f"chmod go+x {path}",
            )


def _socket_problems(evidence: Evidence) -> Iterator[Finding]:
    if evidence.config is None:
        return
    access = evidence.config.access
    wanted, group = socket_mode(access), group_of(access)
    for rank, one in evidence.views.items():
        if one.report is None:
            continue
        path = evidence.instance.rank(rank).socket
        try:
            status = path.stat()
        except OSError:
            continue  # it ended meanwhile
        mode = stat.S_IMODE(status.st_mode)
        if mode != wanted or group not in (None, status.st_gid):
            yield warn(
                "sockets",
                f"{path} has mode {mode:o} and group {status.st_gid}, the configuration asks for"
                f" {wanted:o}{'' if group is None else f' and {group}'}",
                f"wcache restart {evidence.instance.rank(rank).id}",
            )


def _names(paths: list[Path]) -> str:
    names = [path.name for path in paths]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
