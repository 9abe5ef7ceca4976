"""What a supervisor needs of its process and of the file system before it begins."""

import contextlib
import fcntl
import os
import resource
import signal
import time
from pathlib import Path
from types import FrameType

from wcache.errors import TryAgainError
from wcache.permissions import check_folder


class Signals:
    """Flags that the handlers set; the loop looks at them when :attr:`wakeup` can be read."""

    def __init__(self) -> None:
        self.stop = False
        self.wakeup, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Where it was ignored, and many a launcher leaves it so, no exit status would be kept. As
        # process 1 it must also wake the loop, for children that are not the supervisor's own.
        signal.signal(signal.SIGCHLD, self._child if os.getpid() == 1 else signal.SIG_DFL)

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup, 4096)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stop = True

    def _child(self, _number: int, _frame: FrameType | None) -> None:
        """Only wakes the loop."""


def reap_orphans(own: set[int]) -> None:
    """As process 1: reaps whoever was left to it; ``own`` are reaped by their pidfds instead."""
    while True:
        try:
            # Only looked at: it may be one of our own.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in own:
                return
            os.waitid(os.P_PID, ended.si_pid, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return


def raise_descriptor_limit() -> int:
    """Takes as many open files as are allowed; returns the soft limit that was in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def seal_descriptors() -> None:
    """Nothing that was open at start reaches a child, and 0, 1 and 2 are taken."""
    while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) > 2:
            with contextlib.suppress(OSError):  # the listing's own, closed by now
                os.set_inheritable(int(entry.name), False)


def make_private_folder(folder: Path) -> None:
    """Raises :class:`NoPermissionError`, with nothing made, when somebody else could put files
    there."""
    check_folder(folder.parent.resolve())
    check_folder(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # It may have been made in between by somebody who was faster.
    check_folder(folder)
    folder.chmod(0o700)


def lock_folder(folder: Path, instance: str, wait_s: float) -> int:
    """The lock that makes a supervisor the only one; held until the process ends.

    Raises :class:`TryAgainError` when another still has it after ``wait_s``.
    """
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(lock)
                whose = f"instance {instance}" if instance else "the default instance"
                raise TryAgainError(
                    f"another supervisor keeps {whose}", hint="wcache status shows its ranks"
                ) from None
        time.sleep(0.05)
