"""What ``up`` is going to do to each rank, and why it must not: decided before anything is done."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from wcache.config import Config
from wcache.difference import brief
from wcache.errors import OutOfMemoryError, TryAgainError, WcacheError
from wcache.fingerprint import wanted_by
from wcache.holdings import Holding, held_words
from wcache.machine.devices import CONTEXT_BYTES
from wcache.ranks import RankView, first_of, holders, rank_words
from wcache.units import size

LOADER_CONTEXT_BYTES = CONTEXT_BYTES
"""The loader has a context while it copies."""
QUANTIZING_BYTES = 640 << 20
"""Of a loader that quantizes: each of its eight readers has a piece, and bands of it in float32."""


@dataclass(kw_only=True, slots=True)
class Rollout:
    """Every rank of the node is in exactly one of these, but ``start``."""

    kept: list[int] = field(default_factory=list)
    """Serve the wanted weights."""
    under_way: list[int] = field(default_factory=list)
    """Are loading the wanted weights."""
    load: list[int] = field(default_factory=list)
    """Are up, with other weights or none: the new ones are loaded beside the old."""
    fresh: list[int] = field(default_factory=list)
    """Are not up."""
    leaving: list[int] = field(default_factory=list)
    """Are up and not part of the layout: stopped once the others are ready."""
    start: list[int] = field(default_factory=list)
    """The supervisor is asked to start them: ``fresh``, and daemons that have lost theirs."""

    @property
    def pending(self) -> list[int]:
        """Ranks whose weights are waited for."""
        return sorted([*self.under_way, *self.load, *self.fresh])


def decide(views: Mapping[int, RankView], config: Config) -> Rollout:
    """Pure. ``views`` are this node's ranks by ``config``, and all others that are known here.

    Raises :class:`WcacheError` when engines use weights that would go, naming them, and
    :class:`TryAgainError` when a rank is loading something else or does not answer.
    """
    local = config.ranks.local_ranks()
    rollout = Rollout()
    for rank, one in sorted(views.items()):
        if one.silence:
            raise TryAgainError(
                f"rank {rank} can not be asked what it holds: {one.silence}",
                hint=f"wcache logs {rank} shows what it is doing; wcache restart {rank} keeps its"
                " weights",
            )
        if rank not in local:
            if one.is_up:
                rollout.leaving.append(rank)
            continue
        if one.report is None or one.unit is None or one.unit.state in ("inactive", "failed"):
            rollout.start.append(rank)
        _place(rollout, rank, one, config)
    _check_leases(views, rollout, config)
    return rollout


def _place(rollout: Rollout, rank: int, one: RankView, config: Config) -> None:
    if one.report is None:
        rollout.fresh.append(rank)
    elif one.serves(config):
        rollout.kept.append(rank)
    elif one.report.progress is None:
        rollout.load.append(rank)
    elif one.report.wanted == wanted_by(config, rank):
        rollout.under_way.append(rank)
    else:
        raise TryAgainError(
            f"rank {rank} is loading other weights (pid {one.report.progress.loader_pid})",
            hint="wait for its end, or give it up with wcache down",
        )


def _check_leases(views: Mapping[int, RankView], rollout: Rollout, config: Config) -> None:
    replaced = [views[rank] for rank in rollout.load if views[rank].is_used]
    leaving = [views[rank] for rank in rollout.leaving if views[rank].is_used]
    used = holders([*replaced, *leaving])
    if not used:
        return
    why = [brief(found) for one in replaced for found in one.differences(config)]
    if leaving:
        why.append(f"{rank_words(one.rank for one in leaving)} would be gone")
    why = list(dict.fromkeys(why))
    raise WcacheError(
        f"engines use weights that would be replaced: {'; '.join([first_of(used), *why])}",
        hint=_lease_hint(leaving, config),
    )


def _lease_hint(leaving: list[RankView], config: Config) -> str:
    if leaving:
        return "stop these engines first, or load beside them with another --instance NAME"
    if config.model.loader == "publish":
        return (
            "stop these engines first, then wcache down and the same wcache up have the next engine"
            " publish"
        )
    return (
        "wcache warm, with the same --model, has new engines get the new weights and lets these"
        " go on; or stop these engines first"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What one rank takes from one device."""

    rank: int
    device: str
    """UUID of a GPU, or ``cpu``."""
    nbytes: int
    slabs: int = 1


def check_slab_counts(loaded: Iterable[Need]) -> None:
    """As every loader would; raises :class:`wcache.errors.UsageError`."""
    from wcache.load.publish import check_slabs

    for need in loaded:
        check_slabs(need.rank, need.slabs)


def check_memory(
    needs: Iterable[Need],
    free: Mapping[str, int],
    views: Mapping[int, RankView],
    others: Iterable[Holding] = (),
) -> None:
    """Raises :class:`OutOfMemoryError` for the first device that has too little. Pure.

    ``others`` is what other instances hold; it is looked at when there is something to explain.
    """
    by_device: dict[str, list[Need]] = {}
    for need in needs:
        by_device.setdefault(need.device, []).append(need)
    for device, parts in by_device.items():
        total = sum(part.nbytes for part in parts)
        if total <= free[device]:
            continue
        ranks = [part.rank for part in parts]
        held = sum(views[rank].held_bytes for rank in ranks if rank in views)
        place = "memory" if device == "cpu" else f"memory on {device}"
        there = [holding for holding in others if holding.device == device]
        words = f"; {held_words(there)}" if there else ""
        raise OutOfMemoryError(
            f"not enough {place}: {rank_words(ranks)} {'needs' if len(ranks) == 1 else 'need'}"
            f" {size(total)}, {size(free[device])} is free{words}",
            # Old weights that would not make enough room are not to be given up for nothing.
            hint=_memory_hint(device, held if total <= free[device] + held else 0, there),
        )


def _memory_hint(device: str, held: int, others: list[Holding]) -> str:
    if held:
        return (
            f"{size(held)} of old weights stay until the new ones are in; wcache warm --replace"
            " frees them first, and no engine can attach until it is done"
        )
    if others:
        name = max(others, key=lambda holding: holding.nbytes).id.instance
        named = f" --instance {name}" if name else ", without --instance,"
        return f"wcache down{named} frees what that one holds"
    if device == "cpu":
        return "stop what uses the memory, or spread the ranks with --nnodes"
    return (
        "nvidia-smi shows who uses it; memory without a process is held by descriptors, of a wcache"
        " in another run folder, say"
    )
