"""The generations that a rank holds, the part that each plays, and their safekeeping."""

import logging
import time
from collections.abc import Collection, Iterator

import msgspec

from wcache.config import Config
from wcache.daemon.configuration import Configuration
from wcache.daemon.generation import Generation, Unread, adopt
from wcache.daemon.handover import generation_of
from wcache.daemon.roles import Record, Roles, take_records, without_access
from wcache.daemon.safekeeping import Safekeeping
from wcache.errors import ProtocolError
from wcache.fingerprint import Fingerprint, compare, wanted_by
from wcache.notify import Notifier
from wcache.protocol.reports import FreedReport, GenerationReport, GenerationRole
from wcache.units import size

log = logging.getLogger(__name__)

# After a restart, clients of a draining generation have this long to renew before it is freed.
DRAIN_GRACE_S = 30.0


class Holdings:
    """Owns every generation of one rank; what is here is in the supervisor's store as well.

    One generation may serve and another be held to go back to. The candidate is what an operator
    wants made ready; a generation that has its weights is staged. All others drain.
    """

    def __init__(self, rank: int, notifier: Notifier, configuration: Configuration) -> None:
        self._rank = rank
        self._configuration = configuration
        self._safekeeping = Safekeeping(notifier)
        self._generations: dict[int, Generation] = {}
        self.unread: list[Unread] = []
        self._last_number = 0
        """The highest that the store has had a descriptor of, as far as that is known."""
        self._roles = Roles()
        self._drain_after = 0.0
        self.freed: FreedReport | None = None

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._generations.values())

    def __bool__(self) -> bool:
        return bool(self._generations)

    # --- what there is ----------------------------------------------------------------------

    @property
    def served(self) -> Generation | None:
        """What an engine that attaches now gets."""
        return None if self._roles.serving is None else self._generations[self._roles.serving]

    @property
    def held(self) -> int | None:
        """The generation that is kept so that an operator can go back to it."""
        return self._roles.held

    @property
    def candidate(self) -> Config | None:
        """What an operator wants made ready beside the served generation."""
        return self._roles.candidate

    @property
    def staging(self) -> Fingerprint | None:
        """The candidate's weights."""
        candidate = self._roles.candidate
        return None if candidate is None else wanted_by(candidate, self._rank)

    @property
    def staged(self) -> Generation | None:
        """The generation that has the candidate's weights, if there is one by now."""
        wanted = self.staging
        found = None if wanted is None else self.matching(wanted)
        return None if found is self.served else found

    @property
    def next_number(self) -> int:
        """For the generation that is loaded next.

        Never that of one that was freed: where the supervisor has not heard of its end, the store
        would have two under one name, and a daemon after this one slabs of both.
        """
        return self._last_number + 1

    @property
    def grace_s(self) -> float:
        """For how long clients of the daemon before this one may still renew their leases."""
        return max(0.0, self._drain_after - time.monotonic())

    def by_digest(self, manifest_digest: str) -> Generation | None:
        """The generation with that manifest, whatever its part."""
        found = (held for held in self if held.manifest_digest == manifest_digest)
        return next(found, None)

    def matching(self, wanted: Fingerprint) -> Generation | None:
        """A generation with these weights: the served one, or else the newest."""
        found = [held for held in self if not compare(held.fingerprint, wanted)]
        serving = self.served
        if serving is not None and serving in found:
            return serving
        return max(found, key=lambda held: held.number, default=None)

    def role(self, held: Generation) -> GenerationRole:
        if held.number == self._roles.serving:
            return "serving"
        if held is self.staged:
            return "staged"
        return "held" if held.number == self._roles.held else "draining"

    def reports(self) -> tuple[GenerationReport, ...]:
        return tuple(self.report(held) for held in self)

    def report(self, held: Generation) -> GenerationReport:
        return held.report(self.role(held), self._roles.configs.get(held.number))

    def problems(self) -> tuple[str, ...]:
        """What is wrong with what is held; ``""`` among them stands for nothing."""
        return (*(one.problem for one in self.unread), self._safekeeping.problem)

    def expected_fds(self) -> int:
        """Descriptors that the supervisor's store should have."""
        held = sum(len(one.fds) for one in (*self, *self.unread))
        return held + self._safekeeping.records + (self._configuration.stored_fd is not None)

    # --- what happens to it -----------------------------------------------------------------

    def adopt(self, handed_over: dict[str, int]) -> Generation | None:
        """Takes over what the supervisor kept; anything that is no whole generation is freed.

        Returns the generation that is served from now on.
        """
        numbers = (generation_of(name) for name in handed_over)
        self._last_number = max((number for number in numbers if number is not None), default=0)
        records = take_records(handed_over)
        whole, dropped, self.unread = adopt(handed_over)
        for name in dropped:
            log.warning("descriptor %s belongs to no whole generation and is dropped", name)
        self._safekeeping.discard(dropped)
        for generation in whole:
            self._generations[generation.number] = generation
        self._roles = self._adopted_roles(records)
        if whole:
            self._drain_after = time.monotonic() + DRAIN_GRACE_S
        return self.served

    def _adopted_roles(self, records: list[Record]) -> Roles:
        """What the last record says, as far as it still is so."""
        said = None
        for record in records:
            try:
                said = record.read()
            except ProtocolError as error:
                log.error("%s: %s", record.name, error.message)
        self._safekeeping.adopt_records(records, said)
        roles = said or Roles()
        serving = roles.serving
        if serving not in self._generations:
            serving = max(self._generations, default=None)
            if roles.serving is not None:
                is_unread = any(one.number == roles.serving for one in self.unread)
                why = "can not be read" if is_unread else "was not kept"
                log.error("generation %d, which was served, %s", roles.serving, why)
        if serving is None:
            return Roles()  # an empty rank loads what the configuration says
        held = roles.held if roles.held in self._generations else None
        if held == serving:
            held = None  # gone back to it is already
        candidate = roles.candidate
        if candidate is not None and self._are_of(serving, candidate):
            # The candidate's weights were to replace a generation that was not kept.
            candidate = None
        roles = msgspec.structs.replace(roles, serving=serving, held=held, candidate=candidate)
        return self._with_configs(roles)

    def _with_configs(self, roles: Roles) -> Roles:
        """``roles`` with the configuration of what is served, if it was so far the only one."""
        configs = {n: config for n, config in roles.configs.items() if n in self._generations}
        if roles.serving is not None and roles.serving not in configs:
            for config in (self._configuration.stored, self._configuration.current):
                if config is not None and self._are_of(roles.serving, config):
                    configs[roles.serving] = without_access(config)
                    break
        return msgspec.structs.replace(roles, configs=configs)

    def _are_of(self, number: int, config: Config) -> bool:
        """True where the weights of ``number`` are what ``config`` wants of this rank."""
        if self._rank not in range(config.ranks.world_size):
            return False
        return not compare(self._generations[number].fingerprint, wanted_by(config, self._rank))

    def keep(self, new: Generation, config: Config | None) -> None:
        """Takes in what was loaded for ``config`` and has it stored; that does not serve it."""
        self._generations[new.number] = new
        self._last_number = max(self._last_number, new.number)
        self._safekeeping.keep(new)
        if config is not None:
            configs = self._roles.configs | {new.number: without_access(config)}
            self._roles = msgspec.structs.replace(self._roles, configs=configs)
        if self._roles.candidate is not None:
            self.keep_roles()

    def serve(self, number: int, *, hold: int | None = None) -> None:
        """Has ``number`` served in place of what is served now, and ``hold`` held.

        There is no candidate afterwards.
        """
        self._play(serving=number, held=None if hold == number else hold,
                   candidate=None)  # fmt: skip

    def stage(self, config: Config) -> None:
        """Makes ``config`` the candidate; what was held for going back makes room, if there is
        something to load."""
        config = without_access(config)
        found = self.matching(wanted_by(config, self._rank))
        held = self._roles.held if found is not None else None
        self._play(candidate=config, held=held)

    def give_up_candidate(self) -> None:
        """Forgets the candidate: what was staged drains."""
        if self._roles.candidate is not None:
            self._play(candidate=None)

    def give_up_held(self) -> None:
        """Holds nothing to go back to any more."""
        if self._roles.held is not None:
            self._play(held=None)

    def give_up_all(self) -> None:
        """Frees everything now; the caller has made sure that nobody uses it."""
        self._roles = Roles()
        for number in list(self._generations):
            self._free(number)
        self.keep_roles()

    def free_drained(self, leased: Collection[int]) -> None:
        """Frees generations that have no part to play and are not among ``leased``."""
        if self.grace_s:
            return
        if self._safekeeping.must_wait:
            return  # what is stored safely stays until what is served is, too
        drained = {held.number for held in self if self.role(held) == "draining"}
        if not (freed := drained.difference(leased)):
            return
        for number in freed:
            self._free(number)
        self.keep_roles()

    def _free(self, number: int) -> None:
        held = self._generations.pop(number)
        self._safekeeping.give_up(held)
        held.close()
        self.freed = FreedReport(number=number, at=time.time(), slab_bytes=held.slab_bytes)
        log.info("freed generation %d: %s", number, size(held.weight_bytes))

    def _play(self, **changes: object) -> None:
        self._roles = msgspec.structs.replace(self._roles, **changes)
        self.keep_roles()

    # --- the store --------------------------------------------------------------------------

    def keep_roles(self) -> None:
        """Has the store say which part each generation plays, where their numbers do not."""
        if self.unread and not self._generations:
            return  # what is said of them stays for the wcache that can read them
        configs = {n: said for n, said in self._roles.configs.items() if n in self._generations}
        self._roles = roles = msgspec.structs.replace(self._roles, configs=configs)
        numbers_tell = (
            roles.serving == max(self._generations, default=None)
            and roles.held is None
            and roles.candidate is None
            # What was given up and is stored yet would be among them after a restart.
            and not self._safekeeping.has_leftovers
        )
        # The configuration is in the store too, and tells what the served generation goes with.
        is_known = self._is_current(configs.get(roles.serving or 0))
        needless = numbers_tell and is_known and all(n == roles.serving for n in configs)
        self._safekeeping.keep_roles(roles, needed=not needless, at_stake=not numbers_tell)

    def _is_current(self, config: Config | None) -> bool:
        current = self._configuration.current
        return config is None or (current is not None and config == without_access(current))

    def store_what_is_not(self) -> None:
        """Tries again to have kept what the supervisor did not confirm."""
        # A store that is full has room for what is held once it has heard what is not.
        if self._safekeeping.discard_again():
            self.keep_roles()
        served = self.served
        # The served one first: nothing else is freed before it is stored.
        self._safekeeping.keep_again(
            sorted((*self, *self.unread), key=lambda held: held is not served)
        )
        self._safekeeping.keep_roles_again()
        self._safekeeping.keep_lost_config(self._configuration)

    def store_again(self) -> int:
        """Hands everything to a supervisor that came back; how many descriptors went."""
        count = self._safekeeping.keep_records_again()
        count += sum(self._safekeeping.keep(held) for held in (*self, *self.unread))
        return count + self._safekeeping.keep_config_again(self._configuration)

    def keep_config(self) -> None:
        """Puts the current configuration in place of the one that is stored."""
        # First of all what went with the old one: afterwards nobody else knows it.
        self.keep_roles()
        self._safekeeping.keep_config(self._configuration)
