"""Having the supervisor keep descriptors, and knowing whether it does."""

import logging
import math
import time
from collections.abc import Iterable

from wcache.daemon.configuration import STORED_NAME, Configuration
from wcache.daemon.generation import Generation, Unread
from wcache.daemon.roles import Record, Roles
from wcache.notify import Notifier

log = logging.getLogger(__name__)

DEADLINE_S = 5.0
AGAIN_S = 10.0
# A turn of the daemon's loop that has taken so long serves its engines before it goes on.
TURN_S = 1.0
# Generations count from 1.
_ROLES = 0


class Safekeeping:
    """What of a rank is in the supervisor's store; a failure is a problem, never an end."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._problems: dict[int, str] = {}
        self._leaving: dict[str, None] = {}
        """Names to be taken out of the store, in order, of which nobody has heard yet."""
        self._again_at = 0.0
        self._records: list[Record] = []
        """Stored, and not known to be gone; the last one counts."""
        self._recorded: Roles | None = None
        self._is_foreign = False
        """The record can not be read, and nothing was decided since: it is kept as it is."""
        self._confirm = False
        self._config_again_at = math.inf
        """When it is handed over again, if nobody listened."""

    @property
    def problem(self) -> str:
        """Why a restart may lose weights; empty when everything was confirmed."""
        left = ""
        if self._leaving:
            left = (
                f"the supervisor did not hear that {len(self._leaving)} descriptors are given up:"
                " what was freed may still take its memory"
            )
        return next(iter(self._problems.values()), left)

    @property
    def must_wait(self) -> bool:
        """True while nothing that is stored may be given up for what may not be."""
        return bool(self._problems) and self._notifier.keeps_descriptors

    @property
    def has_leftovers(self) -> bool:
        """True while the store may hold generations that were given up."""
        return bool(self._leaving)

    @property
    def records(self) -> int:
        return len(self._records)

    def keep(self, held: Generation | Unread) -> int:
        """Hands a generation over and waits for the confirmation; how many descriptors went."""
        if not self._notifier.keeps_descriptors:
            self._problems[held.number] = (
                "no supervisor keeps the descriptors: a restart loses the weights"
            )
            return 0
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
            self._again_at = time.monotonic() + AGAIN_S
            self._problems[held.number] = (
                f"the supervisor did not confirm the {len(held.fds)} descriptors of generation"
                f" {held.number}: a restart may lose the weights"
            )
            log.error("%s", self._problems[held.number])
        return stored

    def keep_again(self, all_held: Iterable[Generation | Unread]) -> None:
        """Tries again, from time to time, what was not confirmed, as long as that goes well."""
        if not self.must_wait or time.monotonic() < self._again_at:
            return
        began = time.monotonic()
        for held in all_held:
            if held.number not in self._problems:
                continue
            self.keep(held)
            if held.number in self._problems:
                return
            if time.monotonic() - began > TURN_S:
                self._again_at = time.monotonic() + TURN_S
                return

    def give_up(self, held: Generation) -> None:
        """Takes a generation out of the store."""
        self._problems.pop(held.number, None)
        self.discard(name for name, _ in held.named_fds())

    def discard(self, names: Iterable[str]) -> None:
        """Takes ``names`` out of the store, now or when the supervisor listens again."""
        if self._notifier.keeps_descriptors:
            self._leaving.update(dict.fromkeys(names))
            if not self._discard(waits=True):
                log.error("%s", self.problem)

    def discard_again(self) -> bool:
        """Tries again, from time to time, what nobody heard; True when that is done by now."""
        if not self._leaving or time.monotonic() < self._again_at:
            return False
        # One that hangs still is not waited for.
        return self._discard(waits=False)

    def _discard(self, *, waits: bool) -> bool:
        """True when everything is taken out; ``waits`` until the first of it is heard."""
        # As with keep(): a supervisor that hangs is not waited for with every slab.
        deadline = time.monotonic() + DEADLINE_S
        for name in list(self._leaving):
            if time.monotonic() > deadline or not self._notifier.remove(name, waits=waits):
                self._again_at = time.monotonic() + AGAIN_S
                return False
            del self._leaving[name]
            waits = True
        return True

    # --- who plays which part ---------------------------------------------------------------

    def adopt_records(self, records: list[Record], read: Roles | None) -> None:
        """Takes over ``records``, of which the last one says ``read``."""
        self._records, self._recorded = records, read
        self._is_foreign = bool(records) and read is None

    def keep_roles(self, roles: Roles, *, needed: bool, at_stake: bool) -> None:
        """Has the store say ``roles``, or nothing where that is not ``needed``.

        ``at_stake``: without it another generation would be served after a restart, or one freed.
        Then the store's word is waited for, and as well where it says something else so far.
        """
        if not self._notifier.keeps_descriptors:
            return
        before, said = self._recorded, roles if needed else None
        is_alone = len(self._records) == int(needed)
        if said == before and is_alone and _ROLES not in self._problems:
            return
        if said is not None and said != before:
            sequence = max((record.sequence for record in self._records), default=0) + 1
            self._records.append(Record.of(said, sequence))
        self._recorded, self._is_foreign = said, False
        self._confirm = at_stake or (before is not None and before.choice != roles.choice)
        self._store_record()

    def keep_roles_again(self) -> None:
        """Tries again, from time to time, what was not confirmed."""
        if self.must_wait and _ROLES in self._problems and time.monotonic() >= self._again_at:
            self._store_record()

    def _store_record(self) -> None:
        """Stores the record that counts, and only then takes the ones before it away."""
        current = self._records[-1:] if self._recorded is not None or self._is_foreign else []
        outdated = self._records[: len(self._records) - len(current)]
        done = all(self._notifier.store(record.name, record.fd) for record in current)
        done = done and (not current or self._is_confirmed())
        if done and outdated:
            done = all(self._notifier.remove(record.name) for record in outdated)
            done = done and self._is_confirmed()
        if done:
            for record in outdated:
                record.close()
            self._records = current
            self._problems.pop(_ROLES, None)
        else:
            self._miss_record()

    def _miss_record(self) -> None:
        self._again_at = time.monotonic() + AGAIN_S
        self._problems[_ROLES] = (
            "the supervisor did not confirm which generation is served: after a restart it may be"
            " another one"
        )
        log.error("%s", self._problems[_ROLES])

    def _is_confirmed(self) -> bool:
        return not self._confirm or self._notifier.barrier()

    def keep_records_again(self) -> int:
        """Hands the record to a supervisor that came back; how many descriptors went."""
        count = sum(self._notifier.store(record.name, record.fd) for record in self._records)
        if count < len(self._records):
            self._miss_record()
        return count

    # --- the configuration ------------------------------------------------------------------

    def keep_config(self, configuration: Configuration) -> None:
        """Puts the current configuration in place of the one that is stored."""
        if configuration.current is not None:
            made = configuration.make_stored()
            # Two of that name would be one too many to tell which counts.
            stored = self._notifier.remove(STORED_NAME) and self._notifier.store(STORED_NAME, made)
            self._expect_config(stored)

    def keep_lost_config(self, configuration: Configuration) -> None:
        """Tries again, from time to time, what nobody heard."""
        if time.monotonic() < self._config_again_at:
            return
        if configuration.current is not None:
            self.keep_config(configuration)
        else:  # of another wcache: it is kept as it came
            self.keep_config_again(configuration)

    def keep_config_again(self, configuration: Configuration) -> int:
        """Hands the stored configuration to a supervisor that came back; 1 if it went."""
        fd = configuration.stored_fd
        if fd is None:
            return 0
        stored = self._notifier.store(STORED_NAME, fd)
        self._expect_config(stored)
        return int(stored)

    def _expect_config(self, stored: bool) -> None:
        lost = self._notifier.keeps_descriptors and not stored
        self._config_again_at = time.monotonic() + AGAIN_S if lost else math.inf
