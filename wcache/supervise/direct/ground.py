"""What a supervisor needs of its process before it begins."""

import contextlib
import os
import signal
from pathlib import Path
from types import FrameType


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


def seal_descriptors() -> None:
    """Nothing that was open at start reaches a child, and 0, 1 and 2 are taken."""
    while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) > 2:
            with contextlib.suppress(OSError):  # the listing's own, closed by now
                os.set_inheritable(int(entry.name), False)
