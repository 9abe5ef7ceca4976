"""Taking the generation that was served last back from an engine that still has it mapped."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from wcache.daemon import answers
from wcache.daemon.generation import Generation, accept, check_is_wanted
from wcache.errors import ManifestError, ProtocolError, WcacheError
from wcache.fingerprint import Fingerprint, compare
from wcache.paths import RankId
from wcache.protocol.messages import (
    AskAgain,
    AskLoad,
    CheckOrder,
    Offer,
    Offered,
    OfferWanted,
    Refused,
    Renew,
)
from wcache.protocol.reports import LeaseReport
from wcache.protocol.wire import close_all
from wcache.served import Served, may_live, read_served, some_of, write_served

log = logging.getLogger(__name__)

# How long a loader is kept from the disk for engines to notice the new daemon. A client looks every
# second at the least, and asks for its lease in the same breath.
GRACE_S = 3.0
# Where an engine publishes there is no disk to be kept from: the loader may as well wait for one
# that is slow to notice, as long as it lives.
PATIENT_S = 60.0
ASK_AGAIN_S = 0.1
# Engines of the daemon before this one count as its own until they have had the time to say so.
RENEWAL_S = 30.0
MAX_REFUSALS = 8


@dataclass(kw_only=True, slots=True)
class Candidate:
    """What an engine has offered, until a loader has looked at the bytes."""

    held: Generation
    peer: LeaseReport
    checker: int | None = None
    """The loader that has the order to check it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where the rank is when somebody would give something back."""

    rank: RankId
    wanted: Fingerprint | None
    busy: str
    """Why nothing is taken now; empty for a rank that holds nothing and loads nothing."""
    number: int
    """The least that a new generation may have."""


class Reclaim:
    """What a rank served last, who may still have it, and who has offered it.

    A candidate is not served, not stored and not counted as held; there is at most one. It is taken
    only by a daemon that holds nothing and loads nothing, from a peer that might publish as well:
    the digest of bytes guards against accidents, not against somebody who chooses them.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._served: Served | None = None
        self._candidate: Candidate | None = None
        self._refused: dict[int, str] = {}
        self._waits_since: float | None = None
        self._renewed_by = time.monotonic() + RENEWAL_S
        self._not_renewed: set[int] = set()
        self._unwritable = ""
        try:
            self._served = read_served(file)
        except WcacheError as error:
            log.warning("what was served last is not known: %s", error.message)
        if self._served is not None:
            self._not_renewed.update(self._served.leases)

    # --- the record -----------------------------------------------------------------------

    def keep(self, serving: Generation | None, leases: Iterable[LeaseReport]) -> None:
        """Has the record say what is served and to whom; while nothing is, it stays as it is."""
        if serving is None:
            return
        pids = {lease.pid for lease in leases}
        last = self._served
        same = last is not None and last.manifest_digest == serving.manifest_digest
        if last is not None and same and time.monotonic() < self._renewed_by:
            pids.update(last.leases)
        now = Served(
            generation=serving.number,
            manifest_digest=serving.manifest_digest,
            fingerprint=serving.fingerprint,
            leases=some_of(pids),
        )
        if now == last and not self._unwritable and self._file.exists():
            return
        self._served = now
        try:
            write_served(self._file, now)
            self._unwritable = ""
        except OSError as error:  # a full /run must not end a daemon that holds weights
            if self._unwritable != str(error):
                log.error("what is served can not be recorded: %s", error)
            self._unwritable = str(error)

    def leased(self, pid: int) -> None:
        """An engine has a lease on this daemon."""
        self._not_renewed.discard(pid)

    @property
    def renewing(self) -> tuple[int, ...]:
        """Live engines that had leases before this daemon's start, and may have the weights mapped.

        One that compiles or copies for seconds has not noticed the restart yet.
        """
        if time.monotonic() >= self._renewed_by:
            return ()
        return tuple(sorted(pid for pid in self._not_renewed if may_live(pid)))

    # --- what an empty daemon waits for -----------------------------------------------------

    def begin(self, wanted: Fingerprint | None) -> None:
        """Called when a daemon starts with nothing: engines have a moment to come back."""
        if self._served is not None and self._served.may_come_back(wanted):
            self._waits_since = time.monotonic()
            log.info(
                "generation %d was lost, and engines that have it mapped may live: they have"
                " %g s to give it back before anything is loaded",
                self._served.generation,
                GRACE_S,
            )

    @property
    def is_expected(self) -> bool:
        """True while an offer is there, or may be by the end of the grace."""
        return self._candidate is not None or self._waits(GRACE_S)

    def _waits(self, for_s: float) -> bool:
        return self._waits_since is not None and time.monotonic() < self._waits_since + for_s

    def in_words(self) -> str:
        """For the rank's sentence; empty when nothing is expected."""
        if self._candidate is not None:
            held, who = self._candidate.held, _name(self._candidate.peer)
            return f"empty, {who} gives generation {held.number} back, waiting for the loader"
        if self._served is not None and self.is_expected:
            return f"empty, engines may give generation {self._served.generation} back"
        return ""

    def problems(self) -> Iterator[str]:
        """Refused engines that may still be running, by name."""
        for pid, why in self._refused.items():
            if may_live(pid):
                yield why

    # --- engines ----------------------------------------------------------------------------

    def renew(
        self, standing: Standing, lease: LeaseReport, message: Renew, *, trusted: bool
    ) -> OfferWanted | Refused:
        """The answer to a client whose generation a daemon without any does not hold."""
        served, wanted = self._served, standing.wanted
        known = served is not None and served.manifest_digest == message.manifest_digest
        if served is None or not known or not message.can_offer or lease.pid in self._refused:
            return answers.gone(standing.rank)
        if why := _differences(served.fingerprint, wanted):
            self._refuse(lease, f"has other weights mapped than the wanted ones: {why}")
            return answers.gone(standing.rank)
        if not trusted:
            return answers.may_not_give_back(standing.rank, lease)
        if standing.busy or self._candidate is not None:
            return answers.not_decided(standing.rank)
        return OfferWanted()

    def offer(
        self,
        standing: Standing,
        lease: LeaseReport,
        message: Offer,
        fds: Sequence[int],
        *,
        trusted: bool,
    ) -> Offered | Refused:
        """Takes what a client has mapped as the candidate; owns ``fds`` from here on."""
        busy = standing.busy
        if self._candidate is not None:
            busy = f"{_name(self._candidate.peer)} was faster"
        if not trusted or busy:
            close_all(fds)
            if not trusted:
                return answers.may_not_give_back(standing.rank, lease)
            return answers.no_offer(busy)
        try:
            held = self._accepted(standing, message, fds)
        except (ManifestError, ProtocolError) as error:
            close_all(fds)
            self._refuse(lease, f"offered weights that are refused: {error.message}")
            return Refused(reason="invalid", message=error.message, hint=error.hint)
        self._candidate = Candidate(held=held, peer=lease)
        log.info("%s gives generation %d back, to be checked", _name(lease), held.number)
        return Offered()

    def _accepted(self, standing: Standing, message: Offer, fds: Sequence[int]) -> Generation:
        served = self._served
        if served is None:
            raise ManifestError("it is not known what was served last")
        held = accept(max(served.generation, standing.number), "reclaimed", fds, message.slabs)
        check_is_wanted(held, standing.wanted)
        if held.manifest_digest != served.manifest_digest:
            raise ManifestError(
                f"its manifest is {held.manifest_digest[:19]},"
                f" served last was {served.manifest_digest[:19]}"
            )
        return held

    # --- loaders ----------------------------------------------------------------------------

    def order(
        self, loader: int, message: AskLoad, wanted: Fingerprint | None
    ) -> CheckOrder | AskAgain | None:
        """What a loader is to do before anything else; None when nothing can be reclaimed."""
        candidate = self._candidate
        if message.repair:
            return None
        if candidate is None:
            idle = wanted is not None and wanted.loader == "publish"
            patient = idle and message.source == "checkpoint"
            waits = self._waits(PATIENT_S if patient else GRACE_S)
            if waits and self._served is not None and self._served.may_come_back(wanted):
                return AskAgain(after_s=ASK_AGAIN_S)
            return None
        if why := self.unwanted(wanted):
            self.refuse(why)
            return None
        held, candidate.checker = candidate.held, loader
        return CheckOrder(
            generation=held.number, manifest_digest=held.manifest_digest, slabs=held.slabs
        )

    def unwanted(self, wanted: Fingerprint | None) -> str:
        """Why the candidate is not wanted any more; empty while it is."""
        assert self._candidate is not None
        return _differences(self._candidate.held.fingerprint, wanted)

    @property
    def fds(self) -> list[int]:
        """The candidate's, the manifest's first."""
        return self._candidate.held.fds if self._candidate else []

    def is_checked_by(self, loader: int) -> bool:
        return self._candidate is not None and self._candidate.checker == loader

    def take(self) -> Generation:
        """The candidate, whose bytes are the right ones; the caller owns it."""
        assert self._candidate is not None
        held, who = self._candidate.held, _name(self._candidate.peer)
        self._candidate = self._waits_since = None
        log.info("generation %d is reclaimed from %s, nothing read from disk", held.number, who)
        return held

    def refuse(self, why: str) -> None:
        """Gives the candidate up, and says whose it was."""
        assert self._candidate is not None
        self._refuse(self._candidate.peer, f"offered weights that are refused: {why}")
        self.drop()

    def drop(self) -> None:
        """Gives the candidate up, if there is one: nobody could look at it."""
        if self._candidate is not None:
            self._candidate.held.close()
            self._candidate = None

    def _refuse(self, peer: LeaseReport, why: str) -> None:
        said = f"{_name(peer)} {why}"
        if self._refused.get(peer.pid) != said:
            log.error("%s", said)
        self._refused.pop(peer.pid, None)
        self._refused[peer.pid] = said
        for pid in list(self._refused)[:-MAX_REFUSALS]:
            del self._refused[pid]


def _differences(held: Fingerprint, wanted: Fingerprint | None) -> str:
    if wanted is None:
        return "it is not known what is wanted"
    return "; ".join(map(str, compare(held, wanted)))


def _name(peer: LeaseReport) -> str:
    who = f"pid {peer.pid}" if peer.pid else f"a process of another pid namespace (uid {peer.uid})"
    return f"{who} ({peer.command})"
