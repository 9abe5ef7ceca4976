"""``wcache rollback``: goes back to the weights of before, while they are still held."""

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import typer

from wcache.commands.options import InstanceOption, JsonOption, QuietOption
from wcache.commands.overview import collect, tables
from wcache.config import Config, load_config
from wcache.errors import NotReadyError, WcacheError
from wcache.fingerprint import compare, wanted_by
from wcache.output import Output
from wcache.paths import InstancePaths
from wcache.protocol.messages import Release, Released, Stage, Staged, Switch, Switched
from wcache.ranks import RankView, chosen, rank_words, view
from wcache.rollout import orders, previous
from wcache.rollout.lock import hold
from wcache.rollout.write import write_config
from wcache.units import duration, size


def rollback(
    drop: Annotated[
        bool, typer.Option("--drop", help="Go nowhere: free what is held and not served.")
    ] = False,
    instance: InstanceOption = "",
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Go back to the weights of before the last switch, while they are held.

    They are held while an engine uses them, and after wcache warm --keep-old until the next warm,
    rollback --drop or down. Nothing is read from disk. The configuration goes back with them, and
    the weights that were served drain.
    """
    from wcache.supervise import supervisor_for

    out = Output(as_json=as_json, quiet=quiet, instance=instance)
    paths = InstancePaths.of(instance)
    supervisor = supervisor_for(paths.instance)
    with hold(paths, "wcache rollback"):
        ranks = chosen(paths, [])
        if drop:
            before = view(paths, ranks, supervisor)
            _drop(paths, {rank: one for rank, one in before.items() if one.is_up}, out)
        else:
            current = load_config(paths.config_file)
            ranks = list(current.ranks.local_ranks())
            target = _target(view(paths, ranks, supervisor), paths)
            _go_back(paths, ranks, current, target, out)
    found = collect(paths, ranks, supervisor)
    # What was dropped is not in it, and has been said.
    out.data(found, *(() if drop else tables(found)))


def _drop(paths: InstancePaths, views: Mapping[int, RankView], out: Output) -> None:
    answers, errors = orders.try_all(
        paths, views, lambda _: Release(roles=("staged", "held")), Released
    )
    given_up = [rank for rank, released in answers.items() if released.generations]
    nbytes = sum(answers[rank].slab_bytes for rank in given_up)
    wanted = [r for r in answers if (report := views[r].report) is not None and report.staging]
    loading = [rank for rank in wanted if rank not in given_up]
    if given_up:
        out.say(f"{rank_words(given_up)}: {size(nbytes)} given up; engines keep what they have")
    if loading:
        out.say(f"{rank_words(loading)}: what is being loaded is given up, and will not be served")
    if not (given_up or loading or errors):
        out.say("nothing is held that is not served or in use")
    for error in errors.values():
        raise error
    if wanted:
        _configure_what_is_served(paths, views, out)


def _configure_what_is_served(
    paths: InstancePaths, views: Mapping[int, RankView], out: Output
) -> None:
    """An ``up`` that is given up has written its configuration: a reboot would load that."""
    current, before = load_config(paths.config_file), previous.load(paths)
    local = current.ranks.local_ranks()
    if before is None or before.ranks.local_ranks() != local:
        return
    # A rank that is of neither layout may be up as well.
    served = [views[rank] for rank in local if rank in views]
    if len(served) < len(local) or any(
        one.serves(current) or not one.serves(before) for one in served
    ):
        return
    write_config(msgspec.structs.replace(before, access=current.access), paths.config_file)
    paths.previous_file.unlink()
    out.say("the configuration went back to what is served")


def _target(views: Mapping[int, RankView], paths: InstancePaths) -> Config:
    """The configuration to go back to: the same one on every rank.

    Raises :class:`WcacheError` when a rank does not hold its weights any more.
    """
    if down := [rank for rank, one in views.items() if one.serving is None]:
        raise NotReadyError(
            f"{rank_words(down)} {'serves' if len(down) == 1 else 'serve'} nothing, and all ranks"
            " go back together",
            hint="wcache up starts what is not up, wcache warm loads what is empty",
        )
    before = previous.load(paths)
    found = {rank: held for rank, one in views.items() if (held := _older(one, before)) is not None}
    if not found:
        raise WcacheError(_why_not(views), hint=_from_disk(paths))
    target = next(iter(found.values()))
    if list(target.ranks.local_ranks()) != list(views):
        raise WcacheError("the weights of before have another layout", hint=_loaded_by_up(target))
    # A rank that went back before, in a call that was ended, serves them already.
    without = [r for r, one in views.items() if r not in found and not one.serves(target)]
    if without:
        keep = "does" if len(without) == 1 else "do"
        raise WcacheError(
            f"{rank_words(without)} {keep} not hold the weights of before any more, and"
            f" {rank_words(found)} can not go back alone",
            hint=_from_disk(paths),
        )
    if any(config != target for config in found.values()):
        raise WcacheError(
            f"{rank_words(found)} hold different weights of before", hint=_from_disk(paths)
        )
    return target


def _older(one: RankView, before: Config | None) -> Config | None:
    """What was served before: other weights than are served now, and held to go back to.

    Where none are held for that, it is what engines still use of those with a lower number. Numbers
    are in the order of the loads: after a rollback the highest one below is not what was served
    last. ``before``, where it is known, is.
    """
    serving = one.serving
    if one.report is None or serving is None:
        return None
    others = [
        held
        for held in one.report.generations
        if held.config is not None and one.differences(held.config)
    ]
    older = [held for held in others if held.role == "held"] or [
        held for held in others if held.number < serving.number
    ]
    if before is not None:
        if one.rank not in range(before.ranks.world_size):
            return None
        wanted = wanted_by(before, one.rank)
        older = [held for held in older if not compare(held.fingerprint, wanted)]
    return max(older, key=lambda held: held.number).config if older else None


def _why_not(views: Mapping[int, RankView]) -> str:
    for rank, one in views.items():
        serving = one.serving
        if one.report is None or serving is None:
            continue
        freed = one.report.freed
        if any(held.number > serving.number for held in one.report.generations):
            return f"rank {rank} serves the oldest weights that it holds"
        if freed is not None:
            ago = duration(time.time() - freed.at)
            return (
                f"there is nothing to go back to: rank {rank} has freed generation"
                f" {freed.number}, {size(freed.slab_bytes)}, {ago} ago"
            )
    return "there is nothing to go back to: no other weights were served before"


def _from_disk(paths: InstancePaths) -> str:
    before = previous.load(paths)
    if before is None:
        return "wcache warm --model … reads other weights from disk"
    if before.ranks.local_ranks() != load_config(paths.config_file).ranks.local_ranks():
        return _loaded_by_up(before)
    return f"wcache warm --previous takes the weights of {paths.previous_file}"


def _loaded_by_up(config: Config) -> str:
    model, layout = config.model, config.layout
    sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}
    words = "".join(f" --{name} {count}" for name, count in sizes.items() if count > 1)
    named = shlex.quote(model.hub_id or model.path)
    return f"wcache up --model {named}{words} loads them from disk"


def _go_back(
    paths: InstancePaths, ranks: Sequence[int], current: Config, target: Config, out: Output
) -> None:
    begun = time.monotonic()
    answers, errors = orders.try_all(
        paths, ranks, lambda _: Stage(config=target, load=False), Staged
    )
    if errors:
        orders.try_all(paths, answers, lambda _: Release(roles=("staged",)), Released)
        raise next(iter(errors.values()))
    back = msgspec.structs.replace(target, access=current.access)
    if back != current:
        # First what a reboot loads: a crash between the two loses nothing that counts.
        write_config(back, paths.config_file)
        write_config(current, paths.previous_file)
    _, errors = orders.try_all(
        paths, ranks, lambda rank: Switch(generation=answers[rank].generation), Switched
    )
    for rank, error in errors.items():
        raise WcacheError(
            f"rank {rank} did not go back, and others did: {error.message}",
            hint="wcache warm brings it back too: the configuration has gone back",
        )
    numbers = sorted({answer.generation for answer in answers.values()})
    out.say(
        f"{rank_words(ranks)}: back at generation {' and '.join(map(str, numbers))} in"
        f" {duration(time.monotonic() - begun)}, nothing read from disk"
    )
    out.say("the configuration went back as well: wcache warm --previous goes forward again")
