"""Having the supervisor keep descriptors, and knowing whether it does."""

import logging
import time

from wcache.daemon.configuration import STORED_NAME, Configuration
from wcache.daemon.generation import Generation
from wcache.daemon.notify import Notifier

log = logging.getLogger(__name__)

DEADLINE_S = 5.0
AGAIN_S = 10.0


class Safekeeping:
    """What of a rank is in the supervisor's store; a failure is a problem, never an end."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._problems: dict[int, str] = {}
        self._again_at = 0.0

    @property
    def problem(self) -> str:
        """Why a restart may lose weights; empty when everything was confirmed."""
        return next(iter(self._problems.values()), "")

    @property
    def must_wait(self) -> bool:
        """True while nothing that is stored may be given up for what may not be."""
        return bool(self._problems) and self._notifier.keeps_descriptors

    def keep(self, held: Generation) -> int:
        """Hands a generation over and waits for the confirmation; how many descriptors went."""
        if not self._notifier.keeps_descriptors:
            self._problems[held.number] = (
                "no supervisor keeps the descriptors: a restart loses the weights"
            )
            return 0
        self._again_at = time.monotonic() + AGAIN_S
        deadline = time.monotonic() + DEADLINE_S
        stored = 0
        for name, fd in held.named_fds():
            # Engines are served by the same loop: a supervisor that does not listen is not waited
            # for with every slab.
            if time.monotonic() > deadline or not self._notifier.store(name, fd):
                break
            stored += 1
        if stored == len(held.fds) and self._notifier.barrier():
            self._problems.pop(held.number, None)
        else:
            self._problems[held.number] = (
                f"the supervisor did not confirm the {len(held.fds)} descriptors of generation"
                f" {held.number}: a restart may lose the weights"
            )
            log.error("%s", self._problems[held.number])
        return stored

    def keep_again(self, held: Generation) -> None:
        """Tries again, from time to time, what was not confirmed."""
        if self.must_wait and held.number in self._problems and time.monotonic() >= self._again_at:
            self.keep(held)

    def give_up(self, held: Generation) -> None:
        """Takes a generation out of the store."""
        self._problems.pop(held.number, None)
        for name, _ in held.named_fds():
            self._notifier.remove(name)

    def keep_config(self, configuration: Configuration) -> None:
        """Puts the current configuration in place of the one that is stored."""
        if configuration.current is not None:
            self._notifier.remove(STORED_NAME)
            self._notifier.store(STORED_NAME, configuration.make_stored())

    def keep_config_again(self, configuration: Configuration) -> int:
        """Hands the stored configuration to a supervisor that came back; 1 if it went."""
        fd = configuration.stored_fd
        return int(fd is not None and self._notifier.store(STORED_NAME, fd))
