"""One command at a time changes an instance."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

from wcache.errors import NoPermissionError, TryAgainError, WcacheError
from wcache.machine.permissions import check_folder
from wcache.paths import InstancePaths

DOWN = "wcache down"
"""The command that frees weights, and not for others in their place."""
_MAX_HOLDER = 128


@contextlib.contextmanager
def hold(instance: InstancePaths, command: str) -> Iterator[None]:
    """Holds the instance's lock, which the kernel gives up with this process however it ends.

    Raises :class:`TryAgainError` when another command holds it, naming that one and its pid, and
    :class:`NoPermissionError`, with nothing written, for a run folder of somebody else.
    """
    path = instance.lock_file
    try:
        check_folder(path.parent.resolve())
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except PermissionError:
        raise NoPermissionError(
            f"no permission to write {path}", hint="use sudo, or set WCACHE_RUN_DIR"
        ) from None
    except OSError as error:
        raise WcacheError(
            f"{path} can not be written: {(error.strerror or '').lower()}",
            hint="make room there; the ranks go on",
        ) from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _taken(os.pread(fd, _MAX_HOLDER, 0).decode(errors="replace")) from None
        # Who may open the file may lock it, and so keep the operator out.
        with contextlib.suppress(OSError):
            os.fchmod(fd, 0o600)
        _sign(fd, f"{os.getpid()} {command}\n")
        yield
        # Emptied and not unlinked: who waits to open the file must not lock one that is gone.
        _sign(fd, "")
    finally:
        os.close(fd)


def _sign(fd: int, holder: str) -> None:
    """Says who holds the lock; that there is no room for it does not matter."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, holder.encode(), 0)


def _taken(holder: str) -> TryAgainError:
    pid, _, command = holder.strip().partition(" ")
    safe = "ending it is safe: weights and loads under way stay"
    frees = "ended half-way it has freed the weights of some ranks and not of others"
    return TryAgainError(
        f"another {command or 'wcache'} is at work (pid {pid or 'unknown'})",
        hint=f"wait for its end; {frees if command == DOWN else safe}",
    )
