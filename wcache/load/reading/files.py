"""A checkpoint's file while it is read: through the page cache, or past it where it is cold."""

import contextlib
import ctypes
import errno
import os
import sys
import threading
from pathlib import Path

from wcache.checkpoint import Checkpoint, CheckpointFile
from wcache.checkpoint.document import HINT_DOWNLOAD, unreadable
from wcache.checkpoint.identity import open_unchanged
from wcache.errors import CheckpointError

# What O_DIRECT wants offsets, lengths and addresses to be multiples of; no file system in use asks
# for more than a page.
DIRECT_ALIGNMENT = 4096

# statfs(2): ext2 to ext4, XFS, btrfs, F2FS. A list of those where it is known to help: through
# network file systems, FUSE and what stacks on others, reading past the page cache means a round
# trip for every call, and takes from other hosts' and ranks' reads what they could share.
#
# On a virtual disk, 2 cores: 1.2 GB/s whatever else the machine does, for 0.18 s of CPU a GB. The
# page cache gave 0.7 to 1.6 for 0.28 to 0.44 s, and an older run 1.4 beside 2.0 past it.
_LOCAL_FILE_SYSTEMS = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010})
_STATFS_BYTES = 256  # struct statfs has 120 on 64-bit Linux

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_void_p)


class SourceFile:
    """Opened with its first piece and closed with its last, by whichever thread has that one."""

    def __init__(self, checkpoint: Checkpoint, file: CheckpointFile, pieces: int) -> None:
        self.path: Path = checkpoint.path / file.name
        self._checkpoint = checkpoint
        self._file = file
        self._left = pieces
        self._lock = threading.Lock()
        self._fd = self._probe = self._direct = -1

    def open(self) -> None:
        """Raises :class:`CheckpointError` when the file was replaced since its header was read."""
        with self._lock:
            if self._fd >= 0:
                return
            self._fd = open_unchanged(self._checkpoint, self._file)
            if file_system(self._fd) not in _LOCAL_FILE_SYSTEMS:
                return
            # By way of /proc, so that all three are the file that was just looked at. Where that
            # or O_DIRECT is not to be had, everything goes through the page cache.
            again = f"/proc/self/fd/{self._fd}"
            with contextlib.suppress(OSError):
                self._probe = os.open(again, os.O_RDONLY | os.O_CLOEXEC)
                # A look at a byte shall not start a read-ahead of megabytes.
                os.posix_fadvise(self._probe, 0, 0, os.POSIX_FADV_RANDOM)
                self._direct = os.open(again, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    @property
    def is_done(self) -> bool:
        """True when its last piece has been read."""
        return not self._left

    def piece_done(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self._close()

    def close(self) -> None:
        """For a file some of whose pieces will not be read any more."""
        with self._lock:
            self._close()

    def is_cold(self, start: int, nbytes: int) -> bool:
        """True when the range should be read past the page cache: it is not there, and it can be.

        Four bytes of it are looked at. RWF_NOWAIT asks without waiting for a disk, and unlike
        mincore(2) of anybody who may read the file.
        """
        if self._direct < 0:
            return False
        byte = bytearray(1)
        for at in (0, nbytes // 3, nbytes * 2 // 3, nbytes - 1):
            try:
                os.preadv(self._probe, [byte], start + at, os.RWF_NOWAIT)
            except BlockingIOError:
                return True
            except OSError:  # a file system that can not tell
                return False
        return False

    def fill(self, view: memoryview, start: int) -> None:
        """Reads until ``view`` is full; raises :class:`CheckpointError`."""
        done = _read(self._fd, view, start, self.path)
        if done < len(view):
            raise self._shrank()

    def fill_direct(self, view: memoryview, start: int, nbytes: int) -> int:
        """Reads ``nbytes`` past the page cache; returns where in ``view`` they begin.

        ``view`` begins on a page and has room for :func:`hull_bytes` of ``nbytes``. Goes through
        the page cache where the file system does not take O_DIRECT after all.
        """
        skip = start % DIRECT_ALIGNMENT
        hull = -(-(skip + nbytes) // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
        try:
            # Short at the end of the file only: whole pages until then.
            done = os.preadv(self._direct, [view[:hull]], start - skip)
        except OSError as error:
            # EFAULT: memory of a driver that the kernel does not let a disk write to.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT):
                raise unreadable(self.path, error) from None
            done = 0
        if done < skip + nbytes:
            rest = max(done, skip)
            self.fill(view[rest : skip + nbytes], start - skip + rest)
        return skip

    def _shrank(self) -> CheckpointError:
        return CheckpointError(f"{self.path} shrank while it was read", hint=HINT_DOWNLOAD)

    def _close(self) -> None:
        for fd in (self._fd, self._probe, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._probe = self._direct = -1


def hull_bytes(nbytes: int) -> int:
    """Room that a direct read of ``nbytes`` needs at most."""
    return nbytes + 2 * DIRECT_ALIGNMENT


def file_system(fd: int) -> int:
    """The f_type of statfs(2); 0 where it can not be asked."""
    data = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(fd, data):
        return 0
    word = data.raw[: ctypes.sizeof(ctypes.c_long)]
    return int.from_bytes(word, sys.byteorder) & 0xFFFFFFFF


def _read(fd: int, view: memoryview, start: int, path: Path) -> int:
    """Fills ``view`` as far as the file goes."""
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], start + done)
        except OSError as error:
            raise unreadable(path, error) from None
        if not count:
            break
        done += count
    return done
