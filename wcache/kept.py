"""Files that save time and are never needed: what was found out once, by name."""

import contextlib
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
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if not _is_ours(os.fstat(folder)):
                    log.warning("%s is not used: others may write to it", self.folder)
                    return None
                # O_NONBLOCK because open(2) of a fifo would wait for its writer.
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
                fd = os.open(name + _SUFFIX, flags, dir_fd=folder)
            finally:
                os.close(folder)
            with os.fdopen(fd, "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or not _is_ours(status):
                    return None
                data = file.read(MAX_ENTRY_BYTES + 1)
            if len(data) <= MAX_ENTRY_BYTES:
                return data
        return None

    def write(self, name: str, data: bytes) -> None:
        """Keeps ``data``, where that is possible, and makes room for it."""
        if len(data) > MAX_ENTRY_BYTES:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_ours(self.folder.lstat()):
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


def _is_ours(status: os.stat_result) -> bool:
    """True for what belongs to root or this user, and nobody else may write to."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
