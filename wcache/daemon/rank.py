"""What a rank holds and who uses it: generations, leases, the load under way.

No sockets here: a peer is a number, and everything it asks for comes in as a call.
"""

import logging
import os
import time

import msgspec

import wcache
from wcache.config import AccessSection, Config
from wcache.daemon import answers, changeover, ready, words
from wcache.daemon.changeover import Change, Changed
from wcache.daemon.configuration import Configuration
from wcache.daemon.generation import Generation
from wcache.daemon.holdings import Holdings
from wcache.daemon.loading import Loading
from wcache.daemon.reclaim import Reclaim, Standing
from wcache.difference import Difference
from wcache.fingerprint import Fingerprint, compare
from wcache.notify import Notifier
from wcache.paths import RankPaths
from wcache.protocol.messages import (
    AskAgain,
    AskLoad,
    Attach,
    Attached,
    Checked,
    CheckOrder,
    Leased,
    LoadFailed,
    LoadOrder,
    NothingToLoad,
    Offer,
    Offered,
    OfferWanted,
    Progress,
    Publish,
    Published,
    Refused,
    Renew,
    Report,
    Staged,
    Stored,
)
from wcache.protocol.reports import LeaseReport
from wcache.state import RankEvent, RankState, advance, loads, serves

log = logging.getLogger(__name__)


class Rank:
    """One rank's life, from adoption to the last lease."""

    def __init__(self, paths: RankPaths, notifier: Notifier, config_file: Configuration) -> None:
        self._paths = paths
        self._notifier = notifier
        self._configuration = config_file
        self._holdings = Holdings(paths.id.rank, notifier, config_file)
        self._leases: dict[int, LeaseReport] = {}
        self._since = time.time()
        self.reclaim = Reclaim(paths.served_file)
        self._loading = Loading(paths.id, self._holdings, self.reclaim, config_file)
        self._said = ""
        self._has_served = False
        self._announced: int | None = None
        self.announcement = ready.Announcement(paths)
        self.state = RankState.EMPTY

    # --- start ----------------------------------------------------------------------------

    def adopt(self, handed_over: dict[str, int]) -> None:
        """Takes over what the supervisor kept; anything that is no whole generation is freed."""
        held = self._holdings.adopt(handed_over)
        # What only another wcache can read is freed by an end of this daemon, like what is served.
        self._has_served = held is not None or bool(self._holdings.unread)
        if held is None:
            return
        self.state = advance(self.state, RankEvent.ADOPTED)
        log.info("adopted generation %s, nothing read from disk", held.in_words())

    def begin(self) -> None:
        """Tells the world what there is; called once the socket listens.

        Raises :class:`ConfigError` when there are neither weights nor a usable configuration.
        """
        if not self._holdings:
            if not self._has_served:
                self._configuration.check(self._paths.id.rank)
            self.reclaim.begin(self._wanted())
        for problem in self._configuration.problems:
            log.error("%s", problem)
        self._holdings.keep_config()
        self.say_status()
        if self._holdings:
            self.announce()
        else:
            self.announcement.withdraw()
            if self.awaits_engine or self._has_served:
                self._notifier.say("READY=1")

    # --- what others ask ------------------------------------------------------------------

    @property
    def config(self) -> Config | None:
        return self._configuration.current

    @property
    def access(self) -> AccessSection:
        return self._configuration.access

    @property
    def awaits_engine(self) -> bool:
        """True when the first engine is to publish, and no loader."""
        return self.config is not None and self.config.model.loader == "publish"

    @property
    def failed(self) -> str:
        """Why the first load failed; empty while there is hope."""
        return self._loading.problem if self.state is RankState.FAILED else ""

    def attach(
        self, peer: int, lease: LeaseReport, message: Attach
    ) -> tuple[Attached | Refused, list[int]]:
        """Gives the served generation; the descriptors go out in front of the answer."""
        if peer in self._leases:
            return answers.leased_already(), []
        held = self._holdings.served
        if held is None:
            return answers.not_ready(self._paths.id, self.state, self.sentence()), []
        if message.wanted is not None:
            found = compare(held.fingerprint, message.wanted)
            if found:
                return answers.mismatch(self._paths.id, found, awaits_engine=self.awaits_engine), []
        self._lease(peer, lease, held)
        answer = Attached(
            generation=held.number, manifest_digest=held.manifest_digest, slabs=held.slabs
        )
        return answer, held.fds

    def renew(
        self, peer: int, lease: LeaseReport, message: Renew, *, trusted: bool
    ) -> Leased | OfferWanted | Refused:
        """Takes up a lease again; who is ``trusted`` may give back what this daemon has lost."""
        if peer in self._leases:
            return answers.leased_already()
        held = self._holdings.by_digest(message.manifest_digest)
        if held is not None:
            self._lease(peer, lease, held)
            return Leased(generation=held.number)
        unread = answers.unread(self._paths.id, self._holdings.unread, message.manifest_digest)
        if unread or self._holdings:
            return unread or answers.gone(self._paths.id)
        return self.reclaim.renew(self._standing(), lease, message, trusted=trusted)

    def offer(
        self, lease: LeaseReport, message: Offer, fds: list[int], *, trusted: bool
    ) -> Offered | Refused:
        """Takes back what a client has mapped, to be checked; owns ``fds`` from here on."""
        answer = self.reclaim.offer(self._standing(), lease, message, fds, trusted=trusted)
        self.say_status()
        return answer

    def ask_load(
        self, peer: int, pid: int, message: AskLoad
    ) -> LoadOrder | CheckOrder | AskAgain | NothingToLoad | Refused:
        """Gives the load to one peer at a time."""
        self.refresh_configuration()
        reply = self._loading.order(
            peer, pid, message, self._wanted(), is_wanted=self._serves_what_is_wanted
        )
        self._follow_load()
        return reply

    def progress(self, peer: int, message: Progress) -> Refused | None:
        return self._loading.progress(peer, message)

    def publish(self, peer: int, message: Publish, fds: list[int]) -> Published | Refused:
        """Takes a new generation and has it stored; owns ``fds`` from here on.

        It is served from now on, unless an operator wants it to be staged.
        """
        new = self._loading.accept(peer, message, fds, self._wanted())
        if isinstance(new, Generation):
            return self._take(new, self._holdings.candidate or self.config)
        self._follow_load()
        return new

    def checked(self, peer: int, message: Checked) -> Published | AskAgain | Refused:
        """Serves what an engine has given back, or gives it up."""
        new = self._loading.accept_checked(peer, message, self._wanted())
        if isinstance(new, Generation):
            return self._take(new, self.config)
        self._follow_load(has_failed=False)
        return new

    def _take(self, new: Generation, config: Config | None) -> Published:
        """Has a new generation stored, and then served, unless an operator wants it staged."""
        self._holdings.keep(new, config)
        if self._holdings.candidate is None:
            self._holdings.serve(new.number, hold=self._holdings.held)
        elif self._holdings.served is None:
            self._holdings.serve(new.number)
        role = "serving" if self._holdings.served is new else "staged"
        log.info("%s generation %s", role, new.in_words())
        self._step(RankEvent.PUBLISHED)
        self._settle()
        return Published(generation=new.number)

    def change(self, message: Change) -> Changed | Refused:
        """Does what an operator decides about generations."""
        # It may just have been written, and says what the record need not.
        self.refresh_configuration()
        leases = self._leases.values()
        load = self._loading.under_way
        reply = changeover.change(self._paths.id, self._holdings, load, leases, message)
        if isinstance(reply, Staged):
            self._loading.problem = ""
        self._settle()
        return reply

    def load_failed(self, peer: int, message: LoadFailed) -> Refused | None:
        refused = self._loading.fail(peer, message)
        self._follow_load()
        return refused

    def peer_gone(self, peer: int) -> None:
        """Ends the lease of a peer that is not there any more, and the load that it had."""
        self._loading.peer_gone(peer)
        self._follow_load()
        if self._leases.pop(peer, None) is not None:
            self.free_drained()
            self.say_status()

    def store_again(self) -> Stored:
        """Hands every descriptor to a supervisor that came back after it had died."""
        count = self._holdings.store_again()
        self._said = ""
        self.say_status()
        if self._holdings:
            self.announce()
        elif self.awaits_engine or self._has_served:
            self._notifier.say("READY=1")
        return Stored(count=count)

    def report(self) -> Report:
        self.refresh_configuration()
        load = self._loading.under_way
        return Report(
            instance=self._paths.id.instance,
            rank=self._paths.id.rank,
            pid=os.getpid(),
            version=wcache.__version__,
            state=self.state,
            status=self.sentence(),
            problems=self.problems(),
            since=self._since,
            wanted=self._wanted(),
            differences=self.differences(),
            expected_fds=self._holdings.expected_fds(),
            generations=self._holdings.reports(),
            leases=tuple(self._leases.values()),
            renewing=self.reclaim.renewing,
            progress=load.report() if load is not None else None,
            reclaiming=not self._holdings and self.reclaim.is_expected,
            staging=self._holdings.staging,
            freed=self._holdings.freed,
        )

    # --- what the loop asks ---------------------------------------------------------------

    def free_drained(self) -> None:
        """Frees generations that are neither served nor leased by anybody."""
        self._holdings.free_drained({lease.generation for lease in self._leases.values()})

    def record(self) -> None:
        served = self._holdings.served
        if served is not None:
            leases = self._leases.values()
            self.reclaim.keep(served, [one for one in leases if one.generation == served.number])

    def store_what_is_not(self) -> None:
        """Tries again to have kept what the supervisor did not confirm."""
        self._holdings.store_what_is_not()

    def refresh_configuration(self) -> None:
        """Reads the configuration if it changed, and keeps a good one in the store."""
        before = self._configuration.problems
        if self._configuration.refresh():
            self._holdings.keep_config()
        if self._configuration.problems != before:
            for problem in self._configuration.problems:
                log.error("%s", problem)

    def say_status(self) -> None:
        """Tells the supervisor the sentence, if it is not the one that it knows."""
        sentence = self.sentence()
        # What a peer said may be in it: one line, or it would be assignments of its own.
        line = " ".join(sentence.split())[: words.MAX_SENTENCE]
        if sentence != self._said and self._notifier.mention(f"STATUS={line}"):
            self._said = sentence

    def extend_start(self, seconds: float) -> None:
        """Asks the supervisor for more time while the first load is under way."""
        if self.state is RankState.LOADING:
            self._notifier.mention(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def sentence(self) -> str:
        """The state in words, for STATUS= and ``status``."""
        if self.state is RankState.FAILED:
            said = f"load failed: {self._loading.problem}"
        else:
            who = "the first engine to publish" if self.awaits_engine else "the loader"
            empty = self.reclaim.in_words() or f"empty, waiting for {who}"
            load = self._loading.under_way
            said = words.doing(self._holdings, self._leases.values(), load, empty=empty)
        if problems := self.problems():
            said += f"; problem: {problems[0]}"
        return said

    def problems(self) -> tuple[str, ...]:
        """What is wrong and does not keep the rank from serving."""
        # A first load that failed is the state itself, and said there.
        failed_before = self._loading.problem and not self.failed
        reload = f"the last load failed: {self._loading.problem}" if failed_before else ""
        missing = self._configuration.missing(self._paths.id.rank)
        found = (
            *self._configuration.problems,
            *self._holdings.problems(),
            self.announcement.problem,
            missing,
            *self.reclaim.problems(),
            reload,
            words.left_over(self._holdings, self._loading.under_way),
        )
        return tuple(problem for problem in found if problem)

    def differences(self) -> tuple[Difference, ...]:
        """In what the served weights are not what the configuration asks for."""
        held, wanted = self._holdings.served, self._wanted()
        if held is None or wanted is None:
            return ()
        return compare(held.fingerprint, wanted)

    @property
    def _serves_what_is_wanted(self) -> bool:
        return self._holdings.served is not None and not self.differences()

    # --- inside ---------------------------------------------------------------------------

    def _wanted(self) -> Fingerprint | None:
        return self._configuration.wanted(self._paths.id.rank)

    def _step(self, event: RankEvent) -> None:
        self.state = advance(self.state, event)
        self._has_served = self._has_served or serves(self.state)
        self.say_status()

    def _settle(self) -> None:
        """Has the state, the ready file and the status follow what is served by now."""
        served = self._holdings.served
        if served is not None:
            if served.number != self._announced:
                self.announce()
        elif self.state is RankState.READY:
            self._step(RankEvent.VACATED)
            self.announcement.withdraw()
            self._announced = None
        self.record()
        self.free_drained()
        self.say_status()

    def _lease(self, peer: int, lease: LeaseReport, held: Generation) -> None:
        self._leases[peer] = msgspec.structs.replace(lease, generation=held.number)
        self.reclaim.leased(lease.pid)
        self.record()
        self.say_status()

    def _standing(self) -> Standing:
        held, load, busy = self._holdings.served, self._loading.under_way, ""
        if held is not None:
            busy = f"generation {held.number} is held"
        elif load is not None:
            busy = f"a load is under way: {load.in_words()}"
        return Standing(
            rank=self._paths.id, wanted=self._wanted(), busy=busy, number=self._holdings.next_number
        )

    def _follow_load(self, *, has_failed: bool = True) -> None:
        """Has the state follow a load that has begun, or ended without weights.

        It may end without having failed: then another loader is asked.
        """
        is_under_way = self._loading.under_way is not None
        if is_under_way == loads(self.state):
            return
        if is_under_way:
            self._step(RankEvent.LOAD_BEGUN)
            return
        # A publisher that died is no fault of the configuration: the next engine may publish. And
        # a rank that an operator has emptied stays up, for what he does next.
        stays = self.awaits_engine or self._has_served or not has_failed
        abandoned = stays and self.state is RankState.LOADING
        self._step(RankEvent.LOAD_ABANDONED if abandoned else RankEvent.LOAD_FAILED)

    def announce(self) -> None:
        """``.ready`` and READY=1, in that order: after the store has confirmed."""
        held = self._holdings.served
        if held is None:
            return
        self._announced = held.number
        self.announcement.make(self._holdings.report(held))
        self._notifier.say("READY=1")
