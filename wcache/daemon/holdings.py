"""The generations that a rank holds, which of them is served, and their safekeeping."""

import logging
import time
from collections.abc import Collection, Iterator

from wcache.daemon.configuration import Configuration
from wcache.daemon.generation import Generation, adopt
from wcache.daemon.notify import Notifier
from wcache.daemon.safekeeping import Safekeeping
from wcache.units import size

log = logging.getLogger(__name__)

# After a restart, clients of a draining generation have this long to renew before it is freed.
DRAIN_GRACE_S = 30.0


class Holdings:
    """Owns every generation of one rank; what is here is in the supervisor's store as well."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._safekeeping = Safekeeping(notifier)
        self._generations: dict[int, Generation] = {}
        self._unreadable: dict[int, str] = {}
        self._serving: int | None = None
        self._drain_after = 0.0

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._generations.values())

    def __bool__(self) -> bool:
        return bool(self._generations)

    # --- what there is ----------------------------------------------------------------------

    @property
    def served(self) -> Generation | None:
        """What an engine that attaches now gets."""
        return None if self._serving is None else self._generations[self._serving]

    @property
    def next_number(self) -> int:
        """For the generation that is loaded next."""
        return max((*self._generations, *self._unreadable), default=0) + 1

    def by_digest(self, manifest_digest: str) -> Generation | None:
        """The generation with that manifest, whether it is served or not."""
        found = (held for held in self if held.manifest_digest == manifest_digest)
        return next(found, None)

    def problems(self) -> tuple[str, ...]:
        """What is wrong with what is held; ``""`` among them stands for nothing."""
        return (*self._unreadable.values(), self._safekeeping.problem)

    def expected_fds(self) -> int:
        """Descriptors of weights that the supervisor's store should have."""
        return sum(len(held.fds) for held in self)

    # --- what happens to it -----------------------------------------------------------------

    def adopt(self, handed_over: dict[str, int]) -> Generation | None:
        """Takes over what the supervisor kept; anything that is no whole generation is freed.

        Returns the generation that is served from now on.
        """
        whole, dropped, self._unreadable = adopt(handed_over)
        for name in dropped:
            log.warning("descriptor %s belongs to no whole generation and is dropped", name)
            self._notifier.remove(name)
        for generation in whole:
            self._generations[generation.number] = generation
        if whole:
            self._serving = whole[-1].number
            self._drain_after = time.monotonic() + DRAIN_GRACE_S
        return self.served

    def keep(self, new: Generation) -> None:
        """Takes a new generation in and has it stored; it is not served by that."""
        self._generations[new.number] = new
        self._safekeeping.keep(new)

    def serve(self, number: int) -> None:
        """Has ``number`` served in place of what is served now."""
        self._serving = number

    def free_drained(self, leased: Collection[int]) -> None:
        """Frees generations that are neither served nor among ``leased``."""
        if time.monotonic() < self._drain_after:
            return
        if self._safekeeping.must_wait:
            return  # what is stored safely stays until what is served is, too
        for number in [n for n in self._generations if n != self._serving and n not in leased]:
            held = self._generations.pop(number)
            self._safekeeping.give_up(held)
            held.close()
            log.info("freed generation %d: %s", number, size(held.weight_bytes))

    # --- the store --------------------------------------------------------------------------

    def store_what_is_not(self) -> None:
        """Tries again to have kept what the supervisor did not confirm."""
        for held in self:
            self._safekeeping.keep_again(held)

    def store_again(self, configuration: Configuration) -> int:
        """Hands everything to a supervisor that came back; how many descriptors went."""
        count = sum(self._safekeeping.keep(held) for held in self)
        return count + self._safekeeping.keep_config_again(configuration)

    def keep_config(self, configuration: Configuration) -> None:
        """Puts the current configuration in place of the one that is stored."""
        self._safekeeping.keep_config(configuration)
