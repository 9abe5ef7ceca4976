"""``wcache down``: stops ranks and frees their weights."""

import contextlib
from collections.abc import Mapping
from typing import Annotated

import typer

from wcache.commands.options import InstanceOption, QuietOption, RankArguments
from wcache.errors import WcacheError
from wcache.output import Output, counted
from wcache.paths import InstancePaths
from wcache.ranks import RankView, chosen, first_of, holders, rank_words, select, view
from wcache.rollout.lock import DOWN, hold
from wcache.units import size


def down(
    ranks: RankArguments = None,
    instance: InstanceOption = "",
    force: Annotated[
        bool, typer.Option("--force", help="Also when engines hold leases; they keep running.")
    ] = False,
    disable: Annotated[
        bool, typer.Option("--disable", help="A reboot does not start them again either.")
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Stop ranks and free their weights. To keep the weights, use restart.

    Refused while engines hold leases, unless forced: an engine keeps what it has mapped until it
    ends, so the memory would not be free, and nobody could attach to it any more. The next up
    takes the same weights back from it without reading them.
    """
    from wcache.supervise import supervisor_for

    paths, named = select(instance, ranks or [])
    out = Output(quiet=quiet, instance=paths.instance)
    wanted = chosen(paths, named)
    supervisor = supervisor_for(paths.instance)
    with hold(paths, DOWN):
        found = view(paths, wanted, supervisor)
        used = holders(found.values())
        if used and not force:
            raise WcacheError(
                f"engines hold {counted(len(used), 'lease')}: {first_of(used)}",
                hint="stop these engines first, or say --force: they keep their memory until"
                " they end",
            )
        unasked = {rank: why for rank, one in found.items() if (why := _silence(one))}
        if unasked and not force:
            raise WcacheError(
                f"{rank_words(unasked)} can not be asked who uses it:"
                f" {next(iter(unasked.values()))}",
                hint="wcache logs says more; --force stops it nevertheless",
            )
        up = [rank for rank, one in found.items() if one.is_up]
        held = sum(found[rank].held_bytes for rank in up)
        if disable:
            supervisor.disable(wanted)
        if up:
            supervisor.stop(up)
            _forget(paths, found)
        if not named:
            supervisor.shutdown()
    if not up:
        out.say("nothing was up")
        return
    mute = [rank for rank in up if found[rank].report is None]
    if mute and not used:
        out.say(f"{rank_words(up)} down; {rank_words(mute)} could not be asked what was held")
        return
    if not used:
        out.say(f"{rank_words(up)} down, {size(held)} freed")
        return
    out.say(f"{rank_words(up)} down, {size(held)} given up")
    out.warn(f"memory that engines have mapped is free only when they end: {first_of(used)}")


def _forget(paths: InstancePaths, stopped: Mapping[int, RankView]) -> None:
    """Removes the records of what nobody has mapped, and so nobody can give back.

    An engine that starts waits a while where one lies: for it, that rank may be restarting.
    """
    for rank, one in stopped.items():
        if one.report is not None and not one.leases and not one.renewing:
            with contextlib.suppress(OSError):  # it costs those seconds
                paths.rank(rank).served_file.unlink()


def _silence(one: RankView) -> str:
    """Why a daemon that runs can not be asked; empty when it was, or does not run."""
    if one.report is None and one.unit is not None and one.unit.state == "active":
        return one.silence or "its daemon does not listen just now"
    return one.silence
