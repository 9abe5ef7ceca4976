"""What a rank is doing, in the words of STATUS= and ``status``. Pure."""

from collections.abc import Collection, Iterator

from wcache.daemon.generation import Generation
from wcache.daemon.holdings import Holdings
from wcache.daemon.load import Load
from wcache.hints import for_instance
from wcache.paths import RankId
from wcache.protocol.messages import LoadFailed
from wcache.protocol.reports import LeaseReport
from wcache.units import size

# The supervisor takes messages of 4,096 bytes.
MAX_SENTENCE = 800


def doing(
    holdings: Holdings, leases: Collection[LeaseReport], load: Load | None, *, empty: str
) -> str:
    """What is held, in which part, and what is being loaded; ``empty`` says that nothing is."""
    said = list(_held(holdings, leases))
    if load is not None:
        said.append(f"loading generation {load.generation}: {load.in_words()}")
    return "; ".join(said) or empty


def _held(holdings: Holdings, leases: Collection[LeaseReport]) -> Iterator[str]:
    served = holdings.served
    if served is not None:
        yield f"serving generation {served.in_words(_count(served, leases))}"
    for held in holdings:
        role = holdings.role(held)
        if role == "draining":
            count = _count(held, leases)
            words = "1 lease" if count == 1 else f"{count} leases"
            yield f"generation {held.number} drains: {words}"
        elif role == "held":
            yield f"generation {held.number} is held for rollback: {size(held.weight_bytes)}"


def _count(held: Generation, leases: Collection[LeaseReport]) -> int:
    return sum(lease.generation == held.number for lease in leases)


def left_over(holdings: Holdings, load: Load | None) -> str:
    """What an operator has begun and not finished; empty when there is nothing."""
    way_out = (
        "wcache warm with the same options goes on with it, wcache rollback --drop gives it up"
    )
    if holdings.staged is not None:
        return f"generation {holdings.staged.number} is loaded and not served: {way_out}"
    if holdings.candidate is not None and load is None:
        return f"other weights are wanted beside these, and no loader is at work: {way_out}"
    return ""


def why(message: LoadFailed, rank: RankId) -> str:
    """The reason of a failed load, with what to type for it."""
    if not message.hint:
        return message.message
    return f"{message.message} ({for_instance(message.hint, rank.instance)})"
