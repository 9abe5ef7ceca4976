"""One command at a time changes an instance."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from wcache.errors import NoPermissionError, TryAgainError
from wcache.paths import InstancePaths

_MAX_HOLDER = 128


@contextmanager
def hold(instance: InstancePaths, command: str) -> Iterator[None]:
    """Holds the instance's lock, which the kernel gives up with this process however it ends.

    Raises :class:`TryAgainError` when another command holds it, naming that one and its pid.
    """
    path = instance.lock_file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except PermissionError:
        raise NoPermissionError(
            f"no permission to write {path}", hint="use sudo, or set WCACHE_RUN_DIR"
        ) from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _taken(os.pread(fd, _MAX_HOLDER, 0).decode(errors="replace")) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {command}\n".encode(), 0)
        yield
        # Emptied and not unlinked: who waits to open the file must not lock one that is gone.
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _taken(holder: str) -> TryAgainError:
    pid, _, command = holder.strip().partition(" ")
    return TryAgainError(
        f"another {command or 'wcache'} is at work (pid {pid or 'unknown'})",
        hint="wait for its end; ending it is safe: weights and loads under way stay",
    )
