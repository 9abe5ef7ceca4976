"""How long the direct supervisor waits for what, and what it runs for a rank."""

import sys
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds; the defaults are those of the systemd units."""

    start_timeout_s: float = 90.0
    """From a daemon's start to READY=1; a daemon extends it with EXTEND_TIMEOUT_USEC=."""
    stop_timeout_s: float = 10.0
    """From SIGTERM to SIGKILL."""
    watchdog_s: float = 10.0
    """A ready daemon that is silent for so long is ended."""
    abort_timeout_s: float = 2.0
    """From SIGABRT, for a daemon that hangs, to SIGKILL."""
    backoff_first_s: float = 0.1
    """Before the first automatic restart; doubled by each failure after it."""
    backoff_limit_s: float = 5.0
    settled_s: float = 10.0
    """A daemon that was ready for so long begins with the first back-off again."""
    takeover_timeout_s: float = 10.0
    """For a daemon that is found running to hand its descriptors over again."""
    stuck_s: float = 5.0
    """From SIGKILL; a process that is there still waits in the kernel, for its disk as a rule."""
    loader_grace_s: float = 2.0
    """For a loader to end by itself after its daemon has ended for good."""
    look_s: float = 1.0
    """How often a supervisor looks whether its files are still there."""
    lock_wait_s: float = 2.0
    """For another supervisor of the instance that is about to end."""
    idle_s: float = 5.0
    """A supervisor that was started in the background ends when it had nothing to keep so long."""


class Backoff:
    """How long to wait before the next automatic restart."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._failures = 0

    def next_s(self) -> float:
        """Twice as long as the last time, up to the limit."""
        # 2 ** 16 is beyond every limit, and a float is not overrun by years of failures.
        factor = 2.0 ** min(self._failures, 16)
        self._failures += 1
        return min(self._timing.backoff_first_s * factor, self._timing.backoff_limit_s)

    def reset(self) -> None:
        self._failures = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Commands:
    """Command lines to which the rank's name is added.

    ``-P`` keeps the folder that an operator happens to stand in out of the module path.
    """

    daemon: tuple[str, ...] = (sys.executable, "-P", "-m", "wcache.daemon")
    loader: tuple[str, ...] = (sys.executable, "-P", "-m", "wcache.load")
