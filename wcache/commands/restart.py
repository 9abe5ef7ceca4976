"""``wcache restart``: restarts daemons and keeps the weights."""

import contextlib
import time
from collections.abc import Collection, Mapping
from typing import Annotated

import typer

from wcache.commands.options import InstanceOption, QuietOption, RankArguments
from wcache.config import Config
from wcache.errors import (
    ConfigError,
    ExitCode,
    NotReadyError,
    UsageError,
    WcacheError,
)
from wcache.output import Output, counted
from wcache.paths import InstancePaths
from wcache.protocol.control import Control
from wcache.protocol.messages import StoreAgain, Stored
from wcache.ranks import RankView, chosen, not_up, rank_words, read_config, select, view
from wcache.rollout.lock import hold
from wcache.rollout.renewal import renew
from wcache.rollout.restart_plan import Change, change_of
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
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Also when other weights would be loaded.")
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Restart daemons and keep the weights. Engines go on; nothing is read from disk.

    Refused when the supervisor does not keep all of a rank's descriptors, since its weights would
    be lost then. Where the configuration was changed under a running rank, a restart loads what it
    wants now beside the old weights: what differs is said, and asked first.

    After an upgrade of wcache its own supervisor is replaced as well, under the daemons.
    """
    from wcache.supervise import supervisor_for

    paths, named = select(instance, ranks or [])
    out = Output(quiet=quiet, instance=paths.instance)
    wanted = chosen(paths, named)
    supervisor = supervisor_for(paths.instance)
    config = _config(paths, out)
    with hold(paths, "wcache restart"):
        before = _taken_over(view(paths, wanted, supervisor), paths, supervisor)
        before = _stored_again(before, paths, supervisor)
        _check(before, named=bool(named), force=force)
        up = {rank: one for rank, one in before.items() if one.is_up}
        if down := before.keys() - up.keys():
            is_, it = ("is", "it") if len(down) == 1 else ("are", "them")
            out.warn(f"{rank_words(down)} {is_} not up and left so: wcache up starts {it}")
        change = change_of(paths, up, config, out) if config else None
        if change is not None and config is not None:
            _check_is_whole(paths, config, up, named)
            _consent(change, out, yes=yes)
        if renew(paths, supervisor, out):
            _check(view(paths, up, supervisor), named=bool(named), force=force)
        out.say(f"restarting {rank_words(up)}, {_kept(up)}")
        begun = time.monotonic()
        supervisor.restart(up)
        _wait(paths, up, supervisor, begun, timeout, out)
        if change is not None and config is not None:
            _follow(change, config, paths, up, supervisor, out)


def _kept(up: Mapping[int, RankView]) -> str:
    """What a restart keeps; who does not answer can not say what he holds."""
    silent = [rank for rank, one in up.items() if one.report is None]
    known = f"{size(sum(one.held_bytes for one in up.values()))} of weights are kept"
    if not silent:
        return known
    stored = sum(one.unit.stored_fds for rank in silent if (one := up[rank]).unit)
    theirs = f"{counted(stored, 'stored descriptor')} of {rank_words(silent)}"
    verb = "is" if stored == 1 else "are"
    return f"{theirs} {verb} kept" if len(silent) == len(up) else f"{known}, and {theirs}"


def _config(paths: InstancePaths, out: Output) -> Config | None:
    """None where there is none that can be used, which is said."""
    try:
        return read_config(paths)
    except ConfigError as error:
        for problem in error.problems or (error.message,):
            out.warn(problem)
        out.warn("the daemons go on with the last good configuration")
        return None


def _check_is_whole(
    paths: InstancePaths, config: Config, changing: Collection[int], named: Collection[int]
) -> None:
    """Raises when ranks that were not named would go on with other weights than those that were."""
    if not named:
        return
    others = view(paths, sorted(set(config.ranks.local_ranks()).difference(changing)), None)
    left = [rank for rank, one in others.items() if one.serving and not one.serves(config)]
    if left:
        raise WcacheError(
            f"{rank_words(left)} would go on with other weights than {rank_words(changing)}: the"
            " configuration was changed",
            hint="leave the ranks out, so that all of them switch together; to keep these weights,"
            " put the configuration back first",
        )


def _consent(change: Change, out: Output, *, yes: bool) -> None:
    """Says what is going to be loaded; raises :class:`WcacheError` unless it is wanted."""
    if not yes and not out.can_ask():
        raise UsageError(
            f"the configuration was changed, and a restart would load other weights:"
            f" {'; '.join(change.lines)}; {change.outlook}",
            hint="--yes does it; to keep these weights, put the configuration back first",
        )
    for line in change.lines:
        out.warn(f"the configuration was changed: {line}")
    out.warn(change.outlook)
    if not yes and not out.ask("load the other weights?"):
        raise WcacheError("nothing was restarted")


def _follow(
    change: Change,
    config: Config,
    paths: InstancePaths,
    before: Mapping[int, RankView],
    supervisor: Supervisor,
    out: Output,
) -> None:
    """Until all ranks serve the changed weights; a load that fails leaves the old ones on all."""
    from wcache.rollout import previous, together
    from wcache.rollout.follow import follow

    ranks = change.ranks
    if load := together.order(paths, ranks, config):
        supervisor.load(load)
    failures = follow(paths, config, supervisor, before, ranks, timeout_s=None, out=out)
    if not failures:
        numbers = together.loaded(paths, supervisor, ranks, config)
        previous.save(paths, [before[rank] for rank in ranks], config)
        together.switch(paths, numbers)
        out.say(f"{rank_words(ranks)} {'serves' if len(ranks) == 1 else 'serve'} the new weights")
        return
    together.give_up(paths, ranks)
    for rank, reason in failures.items():
        out.error(f"rank {rank}: {reason}")
    out.hint("every rank serves the old weights: mend the configuration, then wcache up")
    raise typer.Exit(ExitCode.FAILED)


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


def _stored_again(
    found: dict[int, RankView], paths: InstancePaths, supervisor: Supervisor
) -> dict[int, RankView]:
    """Has descriptors stored again that a supervisor's store had no room for, and may have now."""
    short = [rank for rank, one in found.items() if one.missing_fds and one.report]
    for rank in short:
        # Whether it helped is seen by what is stored.
        with contextlib.suppress(WcacheError, OSError):
            with Control.connect(paths.rank(rank), "operator") as control:
                control.request(StoreAgain(), Stored)
    return view(paths, found, supervisor) if short else found


def _check(before: Mapping[int, RankView], *, named: bool, force: bool) -> None:
    down = [rank for rank, one in before.items() if not one.is_up]
    if down and (named or len(down) == len(before)):
        raise not_up(down)
    for rank, one in before.items():
        if one.unit and one.unit.fault:
            raise WcacheError(one.unit.fault, hint=one.unit.mend)
        if one.missing_fds and one.report and one.unit and not force:
            raise WcacheError(
                f"rank {rank} would lose its weights: the supervisor keeps {one.unit.stored_fds}"
                f" of {one.report.expected_fds} descriptors",
                hint=f"{_why(one)}; --force restarts it nevertheless",
            )


def _why(one: RankView) -> str:
    """Why descriptors are still missing after the daemon was told to have them stored again."""
    room = one.unit.max_fds if one.unit else None
    if one.report is None or room is None or room >= one.report.expected_fds:
        return "wcache logs --supervisor says why"
    return one.mend_store


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
            if now.report.reclaiming:
                continue  # engines may still give back what was lost
            del waiting[rank]
            out.say(f"rank {rank}: {_outcome(rank, old, now, time.monotonic() - begun)}")
        if waiting and time.monotonic() - begun > timeout:
            raise NotReadyError(
                f"{rank_words(waiting)} did not come back within {timeout:g} s",
                hint=f"wcache logs {next(iter(waiting))} says why",
            )
        time.sleep(_PERIOD_S)


def _outcome(rank: int, old: RankView, now: RankView, seconds: float) -> str:
    """What became of a rank's weights; raises :class:`WcacheError` when they are gone."""
    was, serving = old.serving, now.serving
    if serving is None:
        if was is None:
            return f"up after {duration(seconds)}, it held no weights"
        problems = now.report.problems if now.report else ()
        again = "the loader reads them from disk again"
        raise WcacheError(
            f"rank {rank} came back without its weights: {problems[0] if problems else again}",
            hint="wcache status shows how far it is, wcache logs --supervisor says why",
        )
    same = was is not None and was.manifest_digest == serving.manifest_digest
    return (
        f"{serving.how} generation {serving.number} after {duration(seconds)},"
        f" {size(serving.weight_bytes)}{' kept' if same else ''}"
    )
