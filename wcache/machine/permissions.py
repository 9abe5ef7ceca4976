"""Who may do what this process may not."""

import grp
import os
import pwd
import shlex
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from wcache.errors import NoPermissionError

# Which say what a call is about (wcache.paths).
_FOLDERS = ("WCACHE_RUN_DIR", "WCACHE_CONFIG_DIR", "WCACHE_STATE_DIR")


def as_root(words: Sequence[str]) -> str:
    """The call ``wcache WORDS`` for root: sudo has neither our PATH nor our variables."""
    variables = [f"{name}={value}" for name, value in os.environ.items() if name in _FOLDERS]
    return shlex.join(["sudo", *variables, sys.executable, "-P", "-m", "wcache", *words])


def who_may(path: Path, access: int) -> str:
    """A hint that names what keeps this process out of ``path``, and whom it lets in.

    ``access`` is ``os.R_OK`` or the like; to write what is not there is to write to its folder.
    Where a folder above it is the barrier, the path's own group and mode do not help. Empty where
    modes do not explain it.
    """
    found = _barrier(path, access)
    if found is None:
        return ""
    barrier, bits = found
    try:
        status = barrier.stat()
    except OSError:
        return ""
    mode = stat.S_IMODE(status.st_mode)
    own = status.st_uid == os.geteuid()
    owner_may = mode >> 6 & bits == bits
    if mode & bits == bits or (own and owner_may):
        return ""  # it is something else than who we are
    who = _user(status.st_uid) if owner_may else "root"
    if status.st_gid and mode >> 3 & bits == bits:
        who += f" and the group {_group(status.st_gid)}"
    return f"{barrier} (mode {mode:o}) is open to {who} alone"


def may_exist(path: Path) -> bool:
    """True also for what is in a folder that is closed to us: it may be there."""
    try:
        return path.exists()
    except PermissionError:
        return True


def check_folder(folder: Path) -> None:
    """Raises :class:`NoPermissionError` for a folder of somebody who is neither root nor us: he
    could put files there, and could not use those that we put there. One that is absent passes.
    """
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (0, os.geteuid()):
        raise NoPermissionError(
            f"{folder} is not a folder of yours", hint="set WCACHE_RUN_DIR to one that is"
        )


def _barrier(path: Path, access: int) -> tuple[Path, int] | None:
    """The first part of ``path`` that refuses us, and the bits that its mode would need."""
    whole = Path(os.path.realpath(path))
    for folder in reversed(whole.parents):
        if not os.access(folder, os.X_OK, effective_ids=True):
            return folder, os.X_OK
    if access & os.W_OK and not whole.exists():
        whole, access = whole.parent, os.W_OK | os.X_OK
    return None if os.access(whole, access, effective_ids=True) else (whole, access)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"gid {gid}"
