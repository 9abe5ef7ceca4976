"""``wcache restart``: restarts daemons and keeps the weights."""

import time
from collections.abc import Mapping
from typing import Annotated

import typer

from wcache.commands.lock import hold
from wcache.commands.options import InstanceOption, QuietOption, RankArguments
from wcache.errors import ConfigError, NoSuchRankError, NotReadyError, WcacheError
from wcache.output import Output
from wcache.paths import InstancePaths
from wcache.ranks import RankView, chosen, rank_words, read_config, select, view
from wcache.supervise.interface import Supervisor
from wcache.units import duration, size

_PERIOD_S = 0.05
_TAKEOVER_S = 10.0


def restart(
    ranks: RankArguments = None,
    instance: InstanceOption = "",
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="How long to wait.")
    ] = 60.0,
    force: Annotated[
        bool, typer.Option("--force", help="Also when the weights would be lost.")
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Restart daemons and keep the weights. Engines go on; nothing is read from disk.

    Refused when the supervisor does not keep all of a rank's descriptors, since its weights would
    be lost then.
    """
    from wcache.supervise import supervisor_for

    out = Output(quiet=quiet)
    paths, named = select(instance, ranks or [])
    wanted = chosen(paths, named)
    supervisor = supervisor_for(paths.instance)
    try:
        read_config(paths)
    except ConfigError as error:
        for problem in error.problems or (error.message,):
            out.warn(problem)
        out.warn("the daemons go on with the last good configuration")
    with hold(paths, "wcache restart"):
        before = _taken_over(view(paths, wanted, supervisor), paths, supervisor)
        _check(before, named=bool(named), force=force)
        up = {rank: one for rank, one in before.items() if one.is_up}
        held = sum(one.held_bytes for one in up.values())
        out.say(f"restarting {rank_words(up)}, {size(held)} of weights are kept")
        begun = time.monotonic()
        supervisor.restart(up)
        _wait(paths, up, supervisor, begun, timeout, out)


def _taken_over(
    found: dict[int, RankView], paths: InstancePaths, supervisor: Supervisor
) -> dict[int, RankView]:
    """Has daemons whose supervisor died taken over by a new one, which then keeps their weights."""
    orphans = [
        rank
        for rank, one in found.items()
        if one.report is not None and one.unit is not None and one.unit.state == "inactive"
    ]
    if not orphans:
        return found
    supervisor.start(orphans)
    deadline = time.monotonic() + _TAKEOVER_S
    while True:
        again = view(paths, found, supervisor)
        missing = any(again[rank].missing_fds for rank in orphans)
        if not missing or time.monotonic() > deadline:
            return again
        time.sleep(_PERIOD_S)


def _check(before: Mapping[int, RankView], *, named: bool, force: bool) -> None:
    down = [rank for rank, one in before.items() if not one.is_up]
    if down and (named or len(down) == len(before)):
        raise NoSuchRankError(
            f"{rank_words(down)} {'is' if len(down) == 1 else 'are'} not up",
            hint="wcache up starts it" if len(down) == 1 else "wcache up starts them",
        )
    for rank, one in before.items():
        if one.missing_fds and one.report and one.unit and not force:
            raise WcacheError(
                f"rank {rank} would lose its weights: the supervisor keeps {one.unit.stored_fds}"
                f" of {one.report.expected_fds} descriptors",
                hint="wcache logs --supervisor says why; --force restarts it nevertheless",
            )


def _wait(
    paths: InstancePaths,
    before: Mapping[int, RankView],
    supervisor: Supervisor,
    begun: float,
    timeout: float,
    out: Output,
) -> None:
    """Until a new daemon answers for every rank, and serves what the old one served."""
    waiting = dict(before)
    while waiting:
        for rank, now in view(paths, waiting, supervisor).items():
            old = before[rank]
            if now.report is None and now.unit is not None and now.unit.state == "failed":
                raise WcacheError(
                    f"rank {rank} does not come back: {now.unit.status or now.unit.result}",
                    hint=f"wcache logs {rank} says more",
                )
            if now.report is None or (old.report and now.report.pid == old.report.pid):
                continue
            del waiting[rank]
            out.say(f"rank {rank}: {_outcome(rank, old, now, time.monotonic() - begun)}")
        if waiting and time.monotonic() - begun > timeout:
            raise NotReadyError(
                f"{rank_words(waiting)} did not come back within {timeout:g} s",
                hint=f"wcache status and wcache logs {next(iter(waiting))} say why",
            )
        time.sleep(_PERIOD_S)


def _outcome(rank: int, old: RankView, now: RankView, seconds: float) -> str:
    """What became of a rank's weights; raises :class:`WcacheError` when they are gone."""
    was, serving = old.serving, now.serving
    if serving is None:
        if was is None:
            return f"up after {duration(seconds)}, it held no weights"
        raise WcacheError(
            f"rank {rank} came back without its weights, the loader reads them from disk again",
            hint="wcache status shows how far it is, wcache logs --supervisor says why",
        )
    same = was is not None and was.manifest_digest == serving.manifest_digest
    return (
        f"{serving.how} generation {serving.number} after {duration(seconds)},"
        f" {size(serving.weight_bytes)}{' kept' if same else ''}"
    )
