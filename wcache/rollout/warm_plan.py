"""What ``warm`` is going to do to each rank, and why it must not: decided before anything is done.

Pure.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from wcache.config import Config
from wcache.difference import brief
from wcache.errors import OutOfMemoryError, WcacheError
from wcache.fingerprint import wanted_by
from wcache.holdings import Holding, held_words
from wcache.output import Table, counted
from wcache.protocol.reports import GenerationReport
from wcache.ranks import RankView, first_of, holders, rank_words
from wcache.rollout.up_plan import Need, check_slab_counts
from wcache.units import size

Action = Literal[
    "keep",  # the wanted weights are served
    "switch",  # a generation that is held has the wanted weights: it is served instead
    "follow",  # the wanted weights are being loaded
    "load",  # loaded beside what is served, and switched to
    "replace",  # what is served is freed first, and then the wanted weights are loaded
    "fill",  # nothing is served: the wanted weights are loaded
    "refuse",
]
STAGED: tuple[Action, ...] = ("switch", "follow", "load")


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A row of ``warm --dry-run``."""

    rank: int
    action: Action
    detail: str
    generation: int | None = None
    """What is served now."""
    leases: int = 0
    """Engines that go on with what is served now."""
    device: str = "cpu"
    """UUID of a GPU, or ``cpu``."""
    needed_bytes: int = 0
    freed_bytes: int = 0
    """Given up before the load: what ``--replace`` frees, and what is held for rollback."""


class WarmPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of ``warm --dry-run --json``."""

    version: int = 1
    instance: str
    model: str
    revision: str | None
    replace: bool
    ranks: tuple[RankPlan, ...]
    free_bytes: dict[str, int]
    """By device, for those that something is loaded on."""
    problem: str = ""
    """Why none of it is done; empty when it would be."""
    hint: str = ""

    def having(self, *actions: Action) -> list[int]:
        """The ranks to which one of ``actions`` is done."""
        return [one.rank for one in self.ranks if one.action in actions]

    @property
    def staged(self) -> list[int]:
        """Ranks that go on serving until all of them can switch."""
        return self.having(*STAGED)

    @property
    def is_needless(self) -> bool:
        return all(one.action == "keep" for one in self.ranks)


def decide(
    instance: str,
    views: Mapping[int, RankView],
    config: Config,
    *,
    replace: bool,
    needs: Mapping[int, Need],
    free: Mapping[str, int],
    others: Iterable[Holding] = (),
) -> WarmPlan:
    """``views`` are the ranks to warm. ``needs`` are asked of those that have to load, ``free`` of
    the devices that they load on, and ``others``, which is what other instances hold, when there
    is something to explain."""
    planned = [_plan(one, config, replace) for _, one in sorted(views.items())]
    planned = [_with_need(one, views[one.rank], needs) for one in planned]
    devices = {one.device for one in planned if one.needed_bytes}
    plan = WarmPlan(
        instance=instance,
        model=config.model.hub_id or config.model.path,
        revision=config.model.revision,
        replace=replace,
        ranks=tuple(planned),
        free_bytes={device: free[device] for device in sorted(devices)},
    )
    try:
        _check(plan, views, others)
        check_slab_counts(needs[one.rank] for one in planned if one.needed_bytes)
    except WcacheError as error:
        return msgspec.structs.replace(plan, problem=error.message, hint=error.hint)
    return plan


def _plan(one: RankView, config: Config, replace: bool) -> RankPlan:
    report, unit, serving = one.report, one.unit, one.serving
    if report is None:
        if one.is_up and one.unit is not None and not one.silence:
            # Of a restart: by whoever holds the lock, which a dry run does not wait for.
            return _refused(one, f"{one.unit.state}, and does not answer yet: try again")
        return _refused(one, one.silence or "not up, wcache up starts it")
    if unit is not None and unit.state in ("inactive", "failed"):
        return _refused(one, "its supervisor is gone, wcache up starts one that takes it over")
    number = serving.number if serving is not None else None
    found = one.holding(config)
    if found is not None and found.serving:
        return _row(one, "keep", f"generation {number} has the wanted weights")
    if report.progress is not None:
        wanted = wanted_by(config, one.rank)
        if (report.staging or report.wanted) == wanted:
            action: Action = "fill" if serving is None else "follow"
            return _row(one, action, f"pid {report.progress.loader_pid} is loading them")
        return _refused(one, f"other weights are being loaded (pid {report.progress.loader_pid})")
    if found is not None:
        return _row(one, "switch", f"generation {found.number} has the wanted weights")
    if serving is None:
        return _row(one, "fill", "nothing is served")
    why = "; ".join(map(brief, one.differences(config)))
    if replace:
        return _row(one, "replace", f"generation {number} is freed first: {why}")
    return _row(one, "load", f"beside generation {number}: {why}")


def _row(one: RankView, action: Action, detail: str) -> RankPlan:
    serving = one.serving
    return RankPlan(
        rank=one.rank,
        action=action,
        detail=detail,
        generation=serving.number if serving is not None else None,
        leases=one.leases_on(serving.number) if serving is not None else 0,
    )


def _refused(one: RankView, detail: str) -> RankPlan:
    return _row(one, "refuse", detail)


def _with_need(row: RankPlan, one: RankView, needs: Mapping[int, Need]) -> RankPlan:
    # A loader that is at work has taken its memory already.
    is_loading = one.report is not None and one.report.progress is not None
    if row.action not in ("load", "replace", "fill") or is_loading or row.rank not in needs:
        return row
    need = needs[row.rank]
    freed = sum(held.slab_bytes for held in _given_up(one, row.action))
    return msgspec.structs.replace(
        row, device=need.device, needed_bytes=need.nbytes, freed_bytes=freed
    )


def _given_up(one: RankView, action: Action) -> Iterable[GenerationReport]:
    """What is freed before the load; nothing that an engine has mapped is."""
    for held in one.report.generations if one.report else ():
        if not one.leases_on(held.number) and (
            action == "replace" or held.role in ("held", "staged")
        ):
            yield held


def _check(plan: WarmPlan, views: Mapping[int, RankView], others: Iterable[Holding]) -> None:
    refused: dict[str, list[int]] = {}
    for one in plan.ranks:
        if one.action == "refuse":
            refused.setdefault(one.detail, []).append(one.rank)
    if refused:
        said = (f"{rank_words(ranks)}: {detail}" for detail, ranks in refused.items())
        raise WcacheError("; ".join(said), hint="all ranks switch together, or none does")
    replaced = [views[rank] for rank in plan.having("replace")]
    if used := holders(replaced):
        raise WcacheError(
            f"engines use weights that would be freed: {first_of(used)}",
            hint="memory that an engine has mapped is free only when it ends: stop these engines,"
            " or leave --replace out if both fit",
        )
    _check_room(plan, views, others)


def _check_room(plan: WarmPlan, views: Mapping[int, RankView], others: Iterable[Holding]) -> None:
    """Raises :class:`OutOfMemoryError` for the first device that has too little."""
    for device, free in plan.free_bytes.items():
        rows = [one for one in plan.ranks if one.device == device and one.needed_bytes]
        needed = sum(one.needed_bytes for one in rows)
        freed = sum(one.freed_bytes for one in rows)
        if needed <= free + freed:
            continue
        ranks = [one.rank for one in rows]
        held = sum(views[rank].held_bytes for rank in ranks) - freed
        place = "memory" if device == "cpu" else f"memory on {device}"
        words = f"{rank_words(ranks)} {'needs' if len(ranks) == 1 else 'need'} {size(needed)}"
        more = f" and {size(freed)} more would be freed first" if freed else ""
        there = held_words(holding for holding in others if holding.device == device)
        elsewhere = f"; {there}" if there else ""
        if held:
            raise OutOfMemoryError(
                f"not enough {place} to load beside what is served: {words}, {size(free)} is"
                f" free{more}, {size(held)} is held by the old weights{elsewhere}",
                hint="wcache warm --replace frees the old weights before it loads: no engine can"
                " attach until it is done"
                if needed <= free + freed + held
                else "with --replace, which frees the old weights first, it would not fit either",
            )
        raise OutOfMemoryError(
            f"not enough {place}: {words}, {size(free)} is free{more}{elsewhere}",
            hint="wcache status and, on a GPU, nvidia-smi show who uses it",
        )


def table(plan: WarmPlan) -> Table:
    """What would be done, a row for each rank."""
    shown = Table("RANK", "ACTION", ">GEN", ">LEASES", ">NEEDED", ">FREE", ">FREED FIRST", "DETAIL")
    for one in plan.ranks:
        loads = bool(one.needed_bytes)
        shown.add(
            one.rank,
            one.action,
            one.generation,
            one.leases,
            size(one.needed_bytes) if loads else None,
            size(plan.free_bytes[one.device]) if loads else None,
            size(one.freed_bytes) if loads else None,
            one.detail,
        )
    return shown


def losses(plan: WarmPlan, views: Mapping[int, RankView]) -> list[str]:
    """What ``--replace`` frees before anything is loaded, a line for each rank."""
    lines = []
    for rank in plan.having("replace"):
        one = views[rank]
        held = one.report.generations if one.report else ()
        what = " and ".join(
            f"generation {each.number} ({size(each.slab_bytes)}"
            f" of {each.fingerprint.model or 'a model'})"
            for each in held
        )
        lines.append(f"rank {rank} loses {what}")
    return lines


def engines(views: Iterable[RankView]) -> str:
    """What engines that are attached will notice of it."""
    pids = {(lease.pid, lease.uid) for one in views for lease in one.leases}
    if not pids:
        return "what is served goes on until every rank has the new weights"
    keep = "keeps" if len(pids) == 1 else "keep"
    return (
        f"{counted(len(pids), 'engine')} {keep} the old weights; new ones get the new weights once"
        " every rank has them"
    )
