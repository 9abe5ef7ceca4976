"""The words in which a rank says no, or that there is nothing to do. Pure."""

from collections.abc import Iterable

from wcache.daemon.generation import Unread
from wcache.daemon.load import Load
from wcache.difference import Difference
from wcache.hints import OTHER_PUBLISHED
from wcache.paths import RankId
from wcache.protocol.messages import AskLoad, NothingToLoad, Refused
from wcache.protocol.reports import LeaseReport
from wcache.state import RankState, loads


def not_ready(rank: RankId, state: RankState, sentence: str) -> Refused:
    hint = "wcache up waits until it is" if loads(state) else "wcache status says why"
    return Refused(reason="not_ready", message=f"rank {rank} is not ready: {sentence}", hint=hint)


def mismatch(
    rank: RankId, found: tuple[Difference, ...], *, awaits_engine: bool = False
) -> Refused:
    """``awaits_engine`` where the first engine publishes: nothing is loaded beside that."""
    mend = OTHER_PUBLISHED if awaits_engine else "wcache up --model … loads other weights"
    return Refused(
        reason="mismatch",
        message=f"rank {rank} holds other weights: {'; '.join(map(str, found))}",
        hint=f"wcache status shows what is held; {mend}",
        differences=found,
    )


def leased_already() -> Refused:
    return Refused(
        reason="bad_request",
        message="this connection is a lease already",
        hint="a connection is one lease: connect again for another",
    )


def gone(rank: RankId) -> Refused:
    return Refused(
        reason="gone",
        message=f"rank {rank} does not hold that generation any more",
        hint="what is mapped stays valid; the engine maps the new weights when it restarts",
    )


def unread(rank: RankId, kept: Iterable[Unread], manifest_digest: str) -> Refused | None:
    """Of a generation that is kept for another wcache, whose daemon can lease it again."""
    found = (one.problem for one in kept if one.manifest_digest == manifest_digest)
    said = (Refused(reason="not_ready", message=f"rank {rank}: {problem}") for problem in found)
    return next(said, None)


def may_not_give_back(rank: RankId, lease: LeaseReport) -> Refused:
    return Refused(
        reason="gone",
        message=f"rank {rank} has lost that generation, and uid {lease.uid} may not give it back",
        hint="publishers in [access] may: bytes that others read are taken from nobody else",
    )


def not_decided(rank: RankId) -> Refused:
    return Refused(
        reason="not_ready",
        message=f"rank {rank} has lost that generation and is getting weights",
    )


def no_offer(why: str) -> Refused:
    return Refused(reason="busy", message=f"nothing is taken back now: {why}")


def busy(load: Load) -> Refused:
    return Refused(reason="busy", message=f"pid {load.pid} is loading generation {load.generation}")


def not_the_loader() -> Refused:
    return Refused(
        reason="bad_request", message="this peer was not asked to load", hint="ask for a load first"
    )


def nothing_to_load(rank: RankId, generation: int) -> NothingToLoad:
    return NothingToLoad(message=f"rank {rank} holds generation {generation} already")


def nothing_to_repair(rank: RankId) -> Refused:
    return Refused(
        reason="mismatch",
        message=f"rank {rank} does not hold the weights that its configuration asks for",
        hint="wcache up loads them; there is nothing to repair",
    )


def not_now(rank: RankId) -> Refused:
    return Refused(
        reason="busy",
        message=f"other weights are being made ready for rank {rank}",
        hint="wcache warm with the same options goes on with them, wcache rollback --drop gives"
        " them up",
    )


def nothing_by_itself(rank: RankId, generation: int) -> NothingToLoad:
    """A daemon that serves changes its weights by an operator's word alone.

    It does not know of the other ranks: loading and switching by itself, after a restart, say, it
    would serve another model than they do.
    """
    return NothingToLoad(
        message=f"rank {rank} serves generation {generation}, which the configuration does not"
        " want any more: wcache warm loads what it wants"
    )


def staged_already(rank: RankId, generation: int) -> NothingToLoad:
    return NothingToLoad(
        message=f"rank {rank} holds generation {generation}, which is to be served next, already"
    )


def not_held(rank: RankId) -> Refused:
    return Refused(reason="gone", message=f"rank {rank} holds no generation with these weights")


def not_beside(rank: RankId, is_empty: bool) -> Refused:
    if is_empty:
        words = "serves nothing: its loader loads what the configuration says"
    else:
        words = "can not load what an engine publishes"
    return Refused(reason="invalid", message=f"rank {rank} {words}")


def not_staged(rank: RankId, generation: int) -> Refused:
    return Refused(
        reason="gone",
        message=f"generation {generation} of rank {rank} does not wait to be served",
        hint="wcache status shows what is held",
    )


def leased(rank: RankId, count: int) -> Refused:
    words = "an engine uses" if count == 1 else f"{count} engines use"
    return Refused(
        reason="busy",
        message=f"{words} the weights of rank {rank}",
        hint="memory that an engine has mapped is free only when it ends: stop it first",
    )


def in_grace(rank: RankId, seconds: float) -> Refused:
    return Refused(
        reason="busy",
        message=f"rank {rank} was restarted just now, and engines may still renew their leases",
        hint=f"try again in {seconds:.0f} s",
    )


def wrong_source(rank: RankId, message: AskLoad) -> NothingToLoad | Refused:
    """For a loader where an engine publishes, and for an engine where a loader loads."""
    if message.source == "checkpoint":
        return NothingToLoad(message="the first engine publishes the weights of this instance")
    return Refused(
        reason="bad_request",
        message=f"rank {rank} is loaded from a checkpoint and takes nothing else",
        hint="wcache up --instance NAME --model … --loader publish makes one that an engine fills",
    )
