"""The loads of a rank, one at a time: who gets the order, and what is taken from him."""

import logging

from wcache.daemon import answers, changeover, words
from wcache.daemon.configuration import Configuration
from wcache.daemon.generation import Generation, accept, check_is_wanted
from wcache.daemon.holdings import Holdings
from wcache.daemon.load import Load
from wcache.daemon.reclaim import Reclaim
from wcache.errors import ManifestError, ProtocolError
from wcache.fingerprint import Fingerprint
from wcache.paths import RankId
from wcache.protocol.messages import (
    AskAgain,
    AskLoad,
    Checked,
    CheckOrder,
    LoadFailed,
    LoadOrder,
    NothingToLoad,
    Progress,
    Publish,
    Refused,
)
from wcache.protocol.wire import close_all

log = logging.getLogger(__name__)


class Loading:
    """The load under way and the reason of the last failure.

    The rank's state is not decided here: :class:`Rank` has it follow :attr:`under_way`.
    """

    def __init__(
        self, rank: RankId, holdings: Holdings, reclaim: Reclaim, configuration: Configuration
    ) -> None:
        self._rank = rank
        self._holdings = holdings
        self._reclaim = reclaim
        self._configuration = configuration
        self.under_way: Load | None = None
        self.problem = ""
        """Why the last load failed; empty after one that did not, or where another is wanted."""

    def order(
        self, peer: int, pid: int, message: AskLoad, wanted: Fingerprint | None, *, is_wanted: bool
    ) -> LoadOrder | CheckOrder | AskAgain | NothingToLoad | Refused:
        """Gives the load to ``peer``, where there is one and nobody has it.

        ``wanted`` is what the configuration asks for, and ``is_wanted`` says that it is served.
        """
        if self.under_way is not None:
            return answers.busy(self.under_way)
        config = self._holdings.candidate
        if config is None and not self._configuration.problems:
            config = self._configuration.current
        if config is None:
            return Refused(reason="invalid", message="; ".join(self._configuration.problems))
        if not self._holdings and (order := self._reclaim.order(peer, message, wanted)):
            if isinstance(order, CheckOrder):
                self.under_way = Load(
                    peer=peer, pid=pid, generation=order.generation, how="reclaimed", phase="check"
                )
            return order
        if (config.model.loader == "publish") != (message.source == "engine"):
            return answers.wrong_source(self._rank, message)
        nothing = changeover.nothing_to_load(self._rank, self._holdings, message, is_wanted)
        if nothing is not None:
            return nothing
        number = self._holdings.next_number
        self.under_way = Load(
            peer=peer,
            pid=pid,
            generation=number,
            how="published" if message.source == "engine" else "loaded",
            is_staging=self._holdings.candidate is not None,
        )
        log.info("pid %d loads generation %d of %s", pid, number, config.model.path)
        return LoadOrder(generation=number, config=config)

    def progress(self, peer: int, message: Progress) -> Refused | None:
        if self.under_way is None or self.under_way.peer != peer:
            return answers.not_the_loader()
        self.under_way.advance(message)
        return None

    def accept(
        self, peer: int, message: Publish, fds: list[int], wanted: Fingerprint | None
    ) -> Generation | Refused:
        """Takes what was loaded; owns ``fds`` from here on, and the caller the generation."""
        load = self.under_way
        if load is None or load.peer != peer:
            close_all(fds)
            return answers.not_the_loader()
        try:
            if load.is_staging and self._holdings.candidate is None:
                # Also when the configuration asks for them: this rank alone would switch to them.
                raise ManifestError("an operator gave them up while they were loaded")
            new = accept(load.generation, load.how, fds, message.slabs)
            check_is_wanted(new, self._holdings.staging or wanted)
        except (ManifestError, ProtocolError) as error:
            close_all(fds)
            self._fail(f"the weights of pid {load.pid} are refused: {error.message}")
            return Refused(reason="invalid", message=error.message, hint=error.hint)
        self.under_way, self.problem = None, ""
        return new

    def accept_checked(
        self, peer: int, message: Checked, wanted: Fingerprint | None
    ) -> Generation | AskAgain | Refused:
        """Takes what an engine has given back, or gives it up."""
        if self.under_way is None or not self._reclaim.is_checked_by(peer):
            return answers.not_the_loader()
        self.under_way = None
        found = message.problem[: words.MAX_SENTENCE] or self._reclaim.unwanted(wanted)
        if found:
            self._reclaim.refuse(found)
            return AskAgain(after_s=0)
        self.problem = ""
        return self._reclaim.take()

    def fail(self, peer: int, message: LoadFailed) -> Refused | None:
        if self.under_way is None or self.under_way.peer != peer:
            return answers.not_the_loader()
        self._fail(words.why(message, self._rank))
        return None

    def peer_gone(self, peer: int) -> None:
        """Ends the load that ``peer`` had, if it is not there any more."""
        if self.under_way is not None and self.under_way.peer == peer:
            self._fail(f"the loader (pid {self.under_way.pid}) ended before it had published")

    def _fail(self, reason: str) -> None:
        log.error("load failed: %s", reason)
        self._reclaim.drop()
        self.under_way, self.problem = None, reason
        self._holdings.give_up_candidate()
