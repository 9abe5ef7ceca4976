"""Sealed memfds: small data that crosses a process border as a descriptor nobody can change."""

import errno
import fcntl
import os
import stat
import time

from wcache.errors import ProtocolError

REQUIRED_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""All that has to be there before a memfd's content and size can be believed."""

_SEAL_NAMES = {
    fcntl.F_SEAL_SEAL: "seal",
    fcntl.F_SEAL_SHRINK: "shrink",
    fcntl.F_SEAL_GROW: "grow",
    fcntl.F_SEAL_WRITE: "write",
}
# One read(2) or write(2) transfers at most 2 GiB - 4 KiB; see read(2).
_TRANSFER_BYTES = 1 << 30
_SEAL_PATIENCE_S = 1.0
_SEAL_AGAIN_S = 0.02


def create_sealed(name: str, data: bytes) -> int:
    """Returns the descriptor of a memfd that holds ``data`` and is sealed against any change.

    ``name`` is what /proc/PID/fd shows. The caller owns the descriptor, which is close-on-exec.
    Raises OSError when there is no memory or no descriptor left.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest[:_TRANSFER_BYTES]) :]
        add_seals(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def add_seals(fd: int) -> None:
    """Adds :data:`REQUIRED_SEALS`; raises OSError with EBUSY while anything can still write.

    That takes a second: the kernel says EBUSY as well while it uses one of the pages itself, to
    move it for instance, and waits for no more than 150 ms for that (memfd_wait_for_pins in
    mm/memfd.c). Seen once in some 100,000 memfds of 2 MiB.
    """
    deadline = time.monotonic() + _SEAL_PATIENCE_S
    while True:
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, REQUIRED_SEALS)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(_SEAL_AGAIN_S)


def read_sealed(fd: int, max_bytes: int) -> bytes:
    """Returns what a sealed memfd holds, without moving its file offset.

    ``fd`` may come from an untrusted peer: raises :class:`ProtocolError` when it is not a memfd,
    lacks a seal, can not be read, or is larger than ``max_bytes``, before anything is read.
    """
    check_sealed(fd)
    nbytes = os.fstat(fd).st_size
    if nbytes > max_bytes:
        raise ProtocolError(f"memfd of {nbytes} bytes, at most {max_bytes} are taken")
    data = bytearray(nbytes)
    view = memoryview(data)
    done = 0
    while done < nbytes:
        count = os.preadv(fd, [view[done : done + _TRANSFER_BYTES]], done)
        if count == 0:
            raise ProtocolError(f"memfd ends at byte {done} of {nbytes}")
        done += count
    return bytes(data)


def check_sealed(fd: int) -> None:
    """Raises :class:`ProtocolError` unless ``fd`` is a readable memfd that can not change."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise ProtocolError("descriptor is not a memfd")
    if not is_readable(fd):
        raise ProtocolError("descriptor of a memfd was not opened for reading")
    missing = REQUIRED_SEALS & ~seals(fd)
    if missing:
        names = ", ".join(name for bit, name in _SEAL_NAMES.items() if missing & bit)
        raise ProtocolError(f"memfd is not sealed: {names} missing")


def is_readable(fd: int) -> bool:
    """False for what was opened write-only or with O_PATH, which fstat(2) takes all the same."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    return not flags & os.O_PATH and flags & os.O_ACCMODE in (os.O_RDONLY, os.O_RDWR)


def seals(fd: int) -> int:
    """The F_SEAL_* bits of a memfd; raises :class:`ProtocolError` for any other descriptor."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"descriptor is not a memfd: {os.strerror(error.errno or 0)}") from None
