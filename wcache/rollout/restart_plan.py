"""What a restart would load in place of the weights that ranks hold, and what that takes."""

from collections.abc import Mapping
from dataclasses import dataclass

from wcache.config import Config
from wcache.difference import brief
from wcache.errors import WcacheError
from wcache.output import Output
from wcache.paths import InstancePaths
from wcache.ranks import RankView, first_of, holders, rank_words
from wcache.units import size


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """The configuration wants other weights than are served."""

    ranks: tuple[int, ...]
    """Those whose weights are other ones."""
    lines: tuple[str, ...]
    """One for each field that differs, with the ranks."""
    outlook: str
    """What a load takes, what stays until it is done, or why it would fail."""


def change_of(
    instance: InstancePaths, views: Mapping[int, RankView], config: Config, out: Output
) -> Change | None:
    """None when a restart would load nothing else.

    Where an engine publishes, no restart loads anything: what is served stays.
    """
    if config.model.loader == "publish":
        return None
    ranks = tuple(rank for rank, one in views.items() if _differs(rank, one, config))
    if not ranks:
        return None
    return Change(
        ranks=ranks,
        lines=differing(views, ranks, config),
        outlook=_outlook(instance, views, ranks, config, out),
    )


def differing(
    views: Mapping[int, RankView], ranks: tuple[int, ...], config: Config
) -> tuple[str, ...]:
    """Pure. Ranks that differ in the same way share a line."""
    by_line: dict[str, list[int]] = {}
    for rank in ranks:
        for difference in views[rank].differences(config):
            by_line.setdefault(brief(difference), []).append(rank)
    return tuple(f"{rank_words(of)}: {line}" for line, of in by_line.items())


def _differs(rank: int, one: RankView, config: Config) -> bool:
    """A rank that the layout does not have any more is served on, and not loaded."""
    return rank in config.ranks.local_ranks() and bool(one.differences(config))


def _outlook(
    instance: InstancePaths,
    views: Mapping[int, RankView],
    ranks: tuple[int, ...],
    config: Config,
    out: Output,
) -> str:
    from wcache.checkpoint import IdentityCache
    from wcache.holdings import Others
    from wcache.rollout.up_job import Free, needs
    from wcache.rollout.up_plan import check_memory, check_slab_counts
    from wcache.rollout.wanted import from_config

    held = sum(views[rank].held_bytes for rank in ranks)
    try:
        wanted = from_config(config, identities=IdentityCache(instance.identity_folder))
        of_all = needs(wanted.checkpoint, config, instance, out)
        taken = [need for need in of_all if need.rank in ranks]
        check_memory(taken, Free(), views, Others(instance))
        check_slab_counts(taken)
    except WcacheError as error:
        # Nothing is lost by it: a load that fails leaves what is served alone.
        return f"the load would fail, and {size(held)} of old weights be served on: {error.message}"
    new = sum(need.nbytes for need in taken)
    words = f"loading takes {size(new)} beside {size(held)} of old weights, served until then"
    used = holders(views[rank] for rank in ranks)
    return f"{words}; engines keep the old: {first_of(used)}" if used else words
