"""What makes a supervisor the only one of its instance, and is kept while it runs."""

import fcntl
import logging
import os
import time
from pathlib import Path

from wcache.errors import TryAgainError
from wcache.machine.permissions import check_folder
from wcache.paths import InstancePaths
from wcache.protocol import name

log = logging.getLogger(__name__)

_PAUSE_S = 0.05


class Claim:
    """The supervisor's name, and the lock in its folder, until :meth:`close` or the process's end.

    Neither is enough: the folder can be removed with the lock, and the name is not seen from other
    network namespaces, which may well share the folder. Raises :class:`TryAgainError` when another
    supervisor still has one of them after ``wait_s``, :class:`NoPermissionError` when somebody
    else could put files into the folder, and ``OSError``.
    """

    def __init__(self, paths: InstancePaths, wait_s: float) -> None:
        self._paths = paths
        deadline = time.monotonic() + wait_s
        self._name = name.take(paths)
        while self._name is None and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            self._name = name.take(paths)
        if self._name is None:
            pid = name.keeper(paths)
            if pid is not None:
                raise self._taken(pid)
            log.warning("somebody else has taken the supervisor's name: the lock alone must do")
        try:
            self._lock = self._lock_folder(deadline)
        except BaseException:
            self.close_name()
            raise

    @property
    def name(self) -> name.Name | None:
        """None where somebody else has taken it."""
        return self._name

    def renew(self) -> bool:
        """Makes folder and lock again if they were removed; True when they were.

        Raises :class:`TryAgainError` when another supervisor has the folder by now, else as the
        constructor does.
        """
        try:
            if os.path.samestat(os.fstat(self._lock), self._lock_file.lstat()):
                return False
        except FileNotFoundError:
            pass
        lock = self._lock_folder(0)
        os.close(self._lock)
        self._lock = lock
        return True

    def close(self) -> None:
        os.close(self._lock)
        self.close_name()

    def close_name(self) -> None:
        if self._name:
            self._name.close()

    @property
    def _lock_file(self) -> Path:
        return self._paths.supervisor_folder / "lock"

    def _lock_folder(self, deadline: float) -> int:
        make_private_folder(self._paths.supervisor_folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self._lock_file, flags, 0o600)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(lock)
                    raise self._taken(0) from None
            time.sleep(_PAUSE_S)

    def _taken(self, pid: int) -> TryAgainError:
        instance = self._paths.instance
        whose = f"instance {instance}" if instance else "the default instance"
        who = f" (pid {pid})" if pid else ""
        return TryAgainError(
            f"another supervisor{who} keeps {whose}", hint="wcache status shows its ranks"
        )


def make_private_folder(folder: Path) -> None:
    """Raises :class:`NoPermissionError`, with nothing made, when somebody else could put files
    there."""
    check_folder(folder.parent.resolve())
    check_folder(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # It may have been made in between by somebody who was faster.
    check_folder(folder)
    folder.chmod(0o700)
