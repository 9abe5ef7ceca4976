"""Other weights for ranks that serve: loaded beside the old, and switched to by all or none."""

from collections.abc import Collection, Iterable, Mapping

from wcache.config import Config
from wcache.errors import WcacheError
from wcache.paths import InstancePaths
from wcache.protocol.messages import Release, Released, Stage, Staged, Switch, Switched
from wcache.ranks import view
from wcache.rollout import orders
from wcache.supervise.interface import Supervisor


def order(paths: InstancePaths, ranks: Collection[int], config: Config) -> list[int]:
    """Has the daemons want the weights of ``config`` beside theirs; returns who needs a loader.

    No daemon does so by itself, nor does one switch to what was loaded. Raises
    :class:`WcacheError` when one of them refuses; none wants them then.
    """
    answers, errors = orders.try_all(paths, ranks, lambda _: Stage(config=config), Staged)
    if errors:
        give_up(paths, ranks)
        raise next(iter(errors.values()))
    return [rank for rank, answer in answers.items() if answer.step == "load"]


def loaded(
    paths: InstancePaths, supervisor: Supervisor, ranks: Collection[int], config: Config
) -> dict[int, int]:
    """The numbers of the generations that :func:`switch` is to be given, by rank.

    Raises :class:`WcacheError`, with nothing switched, when one is not there any more, or when a
    restart of its daemon could lose it.
    """
    now = view(paths, ranks, supervisor)
    for rank, one in now.items():
        if one.missing_fds and one.lost_supervisor:
            raise WcacheError(
                f"the supervisor of rank {rank} has ended, nobody keeps its descriptors:"
                " nothing was switched",
                hint="wcache up starts one that takes the rank over, then wcache warm again goes"
                " on; wcache logs says how it ended",
            )
        if one.missing_fds and one.report is not None and one.unit is not None:
            raise WcacheError(
                f"the supervisor keeps {one.unit.stored_fds} of {one.report.expected_fds}"
                f" descriptors of rank {rank}: nothing was switched",
                hint="its store may be too small for two generations: wcache doctor looks;"
                " wcache rollback --drop gives the new weights up",
            )
    numbers = {}
    for rank, one in now.items():
        found = one.holding(config)
        if found is None:
            raise WcacheError(
                f"rank {rank} does not hold the new weights any more: nothing was switched",
                hint=f"wcache logs {rank} says why; wcache warm begins again",
            )
        numbers[rank] = found.number
    return numbers


def switch(paths: InstancePaths, numbers: Mapping[int, int], *, keep_old: bool = False) -> None:
    """Has every rank serve the generation of that number."""
    _, errors = orders.try_all(
        paths, numbers, lambda rank: Switch(generation=numbers[rank], keep_old=keep_old), Switched
    )
    if errors:
        rank, error = next(iter(errors.items()))
        raise WcacheError(
            f"rank {rank} did not switch, and others did: {error.message}",
            hint="wcache warm again switches it: the configuration is that of the new weights",
        )


def give_up(paths: InstancePaths, ranks: Iterable[int]) -> int:
    """Gives up what was loaded and is not going to be served; returns its bytes.

    A rank that does not answer has nothing, or is asked again by the next command.
    """
    answers, _ = orders.try_all(paths, ranks, lambda _: Release(roles=("staged",)), Released)
    return sum(released.slab_bytes for released in answers.values())
