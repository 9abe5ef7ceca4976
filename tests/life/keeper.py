"""The supervisor of a rank that lives in the test's own process, and the time there."""

import os
from collections.abc import Sequence

from wcache.notify import Notifier
from wcache.protocol.wire import close_all


class Clock:
    """Stands in for the module ``time``: it goes on only when a step says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Killed(BaseException):
    """The daemon is killed here: nothing of it may catch this."""


class Keeper(Notifier):
    """Hears the daemon and keeps its descriptors as systemd does, several under a name as well."""

    def __init__(self, clock: Clock) -> None:
        super().__init__("/nowhere", None)
        self._clock = clock
        self.stored: list[tuple[str, int]] = []
        self.listens = True
        self.deaf_for = 0
        """So many messages are not heard yet, as by a supervisor that is slow."""
        self.kill_in: int | None = None
        """After so many messages the daemon is killed instead of sending the next one."""
        self.room = 1000
        """For so many descriptors; what comes beyond them is dropped, and not confirmed."""
        self.takes_s = 0.0
        """Time that passes before it confirms something."""
        self._is_dropped = False

    def _send(self, assignments: Sequence[str], fds: Sequence[int], timeout_s: float = 0) -> bool:
        if self.kill_in is not None:
            self.kill_in -= 1
            if self.kill_in < 0:
                self.kill_in = None
                raise Killed
        if not self.listens:
            return False
        if self.deaf_for:
            self.deaf_for -= 1
            return False
        if "BARRIER=1" in assignments:
            self._clock.now += self.takes_s
            was_dropped, self._is_dropped = self._is_dropped, False
            return not was_dropped
        name = next((said[7:] for said in assignments if said.startswith("FDNAME=")), "")
        if "FDSTORE=1" in assignments and not any(_same(fds[0], fd) for _, fd in self.stored):
            if len(self.stored) < self.room:
                self.stored.append((name, os.dup(fds[0])))
            else:
                self._is_dropped = True
        if "FDSTOREREMOVE=1" in assignments:
            close_all([fd for other, fd in self.stored if other == name])
            self.stored = [(other, fd) for other, fd in self.stored if other != name]
        return True

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.stored]

    def hand_over(self) -> dict[str, int]:
        """Copies for the next daemon, by name."""
        handed_over: dict[str, int] = {}
        for name, fd in self.stored:
            assert name not in handed_over, f"two descriptors are stored as {name}"
            handed_over[name] = os.dup(fd)
        return handed_over

    def recover(self) -> None:
        """Listens from now on, and has no bad intentions."""
        self.listens, self.deaf_for, self.kill_in = True, 0, None

    def lose(self) -> None:
        """It was killed, and another one begins with nothing."""
        close_all([fd for _, fd in self.stored])
        self.stored.clear()
        self.listens, self.deaf_for = True, 0


def _same(one: int, other: int) -> bool:
    return os.path.samestat(os.fstat(one), os.fstat(other))
