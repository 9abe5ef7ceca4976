"""Whether the daemon's system unit can start this interpreter and find wcache in it."""

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import wcache

# What PrivateTmp= and ProtectHome=yes put something empty over (systemd.exec(5)).
_TEMPORARY = (Path("/tmp"), Path("/var/tmp"))
_HOMES = (Path("/home"), Path("/root"), Path("/run/user"))


def needed_paths() -> list[Path]:
    """Everything that a unit must be able to read: interpreter, its library, this package."""
    python = Path(sys.executable)
    package = Path(wcache.__file__).parent
    return list(dict.fromkeys([python, python.resolve(), Path(sys.base_prefix), package]))


def problems(paths: Iterable[Path], unit: bytes) -> Iterator[str]:
    """Yields why ``unit``, which runs as root with a sandbox of its own, can not use ``paths``."""
    hidden = _hidden_by(unit)
    for path in paths:
        folder = next((folder for folder in hidden if path.is_relative_to(folder)), None)
        if folder:
            yield f"{path} is hidden from the daemon: its unit sees nothing of {folder}"
        elif closed := _closed_folder(path):
            yield f"{path} is closed to the daemon, which is root without its privileges: {closed}"
        elif (owner := path.stat().st_uid) != 0:
            yield f"{path} belongs to uid {owner}, who could run anything as root with it"


def needs_pythonpath(environment_file: Path) -> bool:
    """True when this process has wcache from PYTHONPATH, and the units would be without it."""
    parent = Path(wcache.__file__).resolve().parent.parent
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if not any(entry and Path(entry).resolve() == parent for entry in given):
        return False
    try:
        text = environment_file.read_text(errors="replace")
    except OSError:
        return True
    return not any(line.lstrip().startswith("PYTHONPATH=") for line in text.splitlines())


def _hidden_by(unit: bytes) -> tuple[Path, ...]:
    lines = {line.strip() for line in unit.splitlines()}
    hidden: tuple[Path, ...] = ()
    if b"PrivateTmp=yes" in lines:
        hidden += _TEMPORARY
    if lines & {b"ProtectHome=yes", b"ProtectHome=tmpfs"}:
        hidden += _HOMES
    return hidden


def _closed_folder(path: Path) -> str:
    """The first folder on the way to ``path`` that uid 0 without CAP_DAC_OVERRIDE can not pass."""
    for folder in reversed(path.parents):
        status = folder.stat()
        mode = status.st_mode
        if status.st_uid == 0:
            may = mode & stat.S_IXUSR
        elif status.st_gid == 0:
            may = mode & stat.S_IXGRP
        else:
            may = mode & stat.S_IXOTH
        if not may:
            return f"{folder} has mode {stat.S_IMODE(mode):o} and belongs to uid {status.st_uid}"
    return ""
