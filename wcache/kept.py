"""Files that save time and are never needed: what was found out once, by name."""

import contextlib
import functools
import logging
import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from wcache.config import write_file

log = logging.getLogger(__name__)

MAX_ENTRY_BYTES = 16 << 20
"""What is known of a checkpoint of 200 shards has 90 KB."""
MAX_ENTRIES = 64
_SUFFIX = ".json"
_LEFTOVER = re.compile(r"\.[0-9a-f]{32}\.json\..+")


@dataclass(frozen=True, slots=True)
class KeptFolder:
    """A folder of JSON files, the newest :data:`MAX_ENTRIES` of them.

    Nothing here raises: whatever is wrong with the folder, there is nothing in it. What others may
    write to is not read.
    """

    folder: Path

    def read(self, name: str) -> bytes | None:
        """At most :data:`MAX_ENTRY_BYTES`; ``name`` is 32 hexadecimal digits."""
        with contextlib.suppress(OSError):
            try:
                folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError:
                if why := self.fault():
                    _tell(self.folder, why)
                return None
            try:
                if why := _fault(os.fstat(folder)):
                    _tell(self.folder, why)
                    return None
                # O_NONBLOCK because open(2) of a fifo would wait for its writer.
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
                fd = os.open(name + _SUFFIX, flags, dir_fd=folder)
            finally:
                os.close(folder)
            with os.fdopen(fd, "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or _writers(status):
                    return None
                data = file.read(MAX_ENTRY_BYTES + 1)
            if len(data) <= MAX_ENTRY_BYTES:
                return data
        return None

    def fault(self) -> str:
        """Why nothing that is here is used, to be read behind the folder's name; empty where it is,
        and where there is none."""
        try:
            return _fault(self.folder.lstat())
        except OSError:
            return ""

    def write(self, name: str, data: bytes) -> None:
        """Keeps ``data``, where that is possible, and makes room for it."""
        if len(data) > MAX_ENTRY_BYTES:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _fault(self.folder.lstat()):
                return
            write_file(self.folder / (name + _SUFFIX), data, mode=0o600)
            self._prune()
        except OSError as error:
            log.debug("%s keeps nothing more: %s", self.folder, error)

    def _prune(self) -> None:
        """Removes the entries that were written first, and what a killed writer left."""
        entries: list[tuple[int, str]] = []
        with os.scandir(self.folder) as found:
            for one in found:
                written = one.stat(follow_symlinks=False).st_mtime_ns
                if one.name.endswith(_SUFFIX) and not one.name.startswith("."):
                    entries.append((written, one.name))
                elif _LEFTOVER.fullmatch(one.name) and written < time.time_ns() - 60 * 10**9:
                    (self.folder / one.name).unlink(missing_ok=True)
        for _, name in sorted(entries)[:-MAX_ENTRIES]:
            (self.folder / name).unlink(missing_ok=True)


@functools.cache
def _tell(folder: Path, why: str) -> None:
    """Once in a process: the same is looked for again for every rank."""
    log.warning("%s %s: what is kept there is not used (wcache doctor)", folder, why)


def _fault(status: os.stat_result) -> str:
    """What makes a folder one that is not used; empty where nothing does."""
    if not stat.S_ISDIR(status.st_mode):
        return "is a symbolic link" if stat.S_ISLNK(status.st_mode) else "is not a folder"
    return _writers(status)


def _writers(status: os.stat_result) -> str:
    """Who may write to it beside root and this user; empty where nobody may."""
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to uid {status.st_uid}"
    mode = stat.S_IMODE(status.st_mode)
    return f"is open to others (mode {mode:o})" if mode & (stat.S_IWGRP | stat.S_IWOTH) else ""
