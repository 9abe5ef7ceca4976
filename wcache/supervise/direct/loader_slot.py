"""The loader that runs beside a rank's daemon: at most one at a time."""

import logging
import math
import signal
import time
from collections.abc import Callable

from wcache.supervise.direct.loop import Loop
from wcache.supervise.direct.timing import Timing
from wcache.supervise.interface import LoaderState
from wcache.supervise.spawn import Plan, Process, spawn

log = logging.getLogger(__name__)


class LoaderSlot:
    """Runs a loader when it is asked to; a loader that fails is reported, never run again."""

    def __init__(self, name: str, loop: Loop, timing: Timing, plan: Callable[[], Plan]) -> None:
        self._name = name
        self._loop = loop
        self._timing = timing
        self._plan = plan
        self._process: Process | None = None
        self._again = False
        self._asked_to_end = False
        self._terminate_at = math.inf
        self._kill_at = math.inf
        self._stuck_at = math.inf
        self._result = ""

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def is_stuck(self) -> bool:
        """True when it was killed and has not ended: nothing here can end it."""
        return time.monotonic() >= self._stuck_at

    @property
    def result(self) -> str:
        """How the last loader ended; empty for well, or when it was asked to end."""
        if self.is_stuck:
            return f"pid {self.pid} was killed and does not end: it waits in the kernel"
        return self._result

    @property
    def state(self) -> LoaderState:
        if self._process and not self.is_stuck:
            return "running"
        return "failed" if self.result else "inactive"

    @property
    def deadline(self) -> float:
        return min(self._terminate_at, self._kill_at)

    def run(self) -> None:
        """Runs a loader, or another one after the end of the one that is at work.

        That one may have asked what is wanted before the configuration changed. A loader that
        finds nothing to load ends at once, so one too many costs nothing.
        """
        if self._process and not self._asked_to_end:
            self._again = True
        else:
            self.run_anew()

    def run_anew(self) -> None:
        """Runs a loader for a new daemon, after the end of one that served the daemon before."""
        if self._process:
            self._again = True
            self._terminate()
            return
        self._again = False
        self._result = ""
        try:
            self._process = spawn(self._plan())
        except OSError as error:
            self._result = f"can not be started: {error}"
            log.error("loader of rank %s %s", self._name, self.result)
            return
        self._asked_to_end = False
        self._loop.watch(self._process.pidfd, self._ended)

    def stop(self) -> None:
        """Ends the loader now."""
        self._again = False
        if self._process:
            self._terminate()

    def stop_soon(self) -> None:
        """Ends the loader if it does not end by itself: its daemon is gone for good."""
        self._again = False
        if self._process and not self._asked_to_end:
            self._terminate_at = time.monotonic() + self._timing.loader_grace_s

    def postpone(self, seconds: float) -> None:
        """Moves everything that is due: for so long nobody looked."""
        self._terminate_at += seconds
        self._kill_at += seconds
        self._stuck_at += seconds

    def tick(self, now: float) -> None:
        if not self._process:
            return
        if now >= self._kill_at:
            self._kill_at = math.inf
            self._stuck_at = now + self._timing.stuck_s
            log.warning("loader of rank %s (pid %d) does not end, killed", self._name, self.pid)
            self._process.send(signal.SIGKILL)
        elif now >= self._terminate_at:
            self._terminate()

    def _terminate(self) -> None:
        assert self._process
        self._terminate_at = math.inf
        if not self._asked_to_end:
            self._asked_to_end = True
            self._kill_at = time.monotonic() + self._timing.stop_timeout_s
            self._process.send(signal.SIGTERM)

    def _ended(self) -> None:
        assert self._process
        ending = self._process.reap()
        if ending is None:
            return
        self._loop.unwatch(self._process.pidfd)
        self._process.close()
        self._process = None
        self._terminate_at = self._kill_at = self._stuck_at = math.inf
        if not (ending.is_clean or self._asked_to_end):
            self._result = str(ending)
            log.warning("loader of rank %s ended: %s", self._name, ending)
        if self._again:
            self.run_anew()
