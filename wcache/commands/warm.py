"""``wcache warm``: has the resident weights match the configuration, under running engines."""

from typing import TYPE_CHECKING, Annotated

import typer

from wcache.commands.options import (
    InstanceOption,
    JsonOption,
    QuietOption,
    RankArguments,
    RevisionOption,
)
from wcache.commands.overview import collect, tables
from wcache.config import DType, Quantization
from wcache.errors import ExitCode, UsageError, WcacheError
from wcache.output import Output
from wcache.ranks import chosen, rank_words, select, told_together, view
from wcache.rollout.lock import hold
from wcache.units import size

if TYPE_CHECKING:
    from wcache.rollout.warm_job import Warming

INTERRUPTED = 130


def warm(
    ranks: RankArguments = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="PATH|HUB_ID", help="Other weights, in the same layout."),
    ] = None,
    revision: RevisionOption = None,
    dtype: Annotated[
        DType | None, typer.Option("--dtype", help="Of floating-point weights. [default: as it is]")
    ] = None,
    quantization: Annotated[
        Quantization | None,
        typer.Option("--quantization", help="fp8 makes it on load. [default: as it is]"),
    ] = None,
    previous: Annotated[
        bool, typer.Option("--previous", help="The weights of before the last switch.")
    ] = False,
    keep_old: Annotated[
        bool,
        typer.Option("--keep-old", help="Hold the old weights for wcache rollback, also unused."),
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Free the old weights first, where both do not fit.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before --replace.")] = False,
    page_cache: Annotated[
        bool, typer.Option("--page-cache", help="Only read the checkpoint's files ahead.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Only say what would be done to each rank.")
    ] = False,
    instance: InstanceOption = "",
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0.1, metavar="SECONDS", help="Give up waiting, not loading."),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Load what the configuration wants beside what is served, and switch.

    Does nothing where the resident weights are the wanted ones. With --model and the like the
    switch changes the configuration too, for weights in the same layout. When every rank has the
    new weights, all switch: engines that are attached keep the old ones, which are freed when the
    last of these engines ends. When one rank fails, none switches. wcache rollback goes back.
    """
    from wcache.rollout import pagecache, together, warm_job, warm_plan
    from wcache.rollout.wanted import Args
    from wcache.supervise import supervisor_for

    _check_options(replace=replace, keep_old=keep_old, page_cache=page_cache)
    paths, named = select(instance, ranks or [])
    out = Output(as_json=as_json, quiet=quiet, instance=paths.instance)
    args = Args(model=model, revision=revision, dtype=dtype, quantization=quantization)
    if page_cache:
        pagecache.read(args, paths, named, out, previous=previous, dry_run=dry_run)
        return
    chosen(paths, named)
    supervisor = supervisor_for(paths.instance)

    def prepare() -> "Warming":
        return warm_job.prepare(
            args, paths, supervisor, out, named=named, go_back=previous, replace=replace
        )

    if dry_run:
        plan = prepare().plan
        out.data(plan, warm_plan.table(plan))
        if plan.problem:
            out.error(plan.problem)
            out.hint(plan.hint)
        raise typer.Exit(ExitCode.FAILED if plan.problem else ExitCode.DONE)
    with hold(paths, "wcache warm"):
        work = prepare()
        if work.plan.problem:
            raise WcacheError(work.plan.problem, hint=work.plan.hint)
        if work.plan.is_needless:
            held = work.plan.having("keep")
            words = "holds" if len(held) == 1 else "hold"
            out.say(f"{rank_words(held)} {words} the wanted weights: there is nothing to do")
            if given_up := together.give_up(paths, held):
                out.say(f"{size(given_up)} that were loaded and never served are given up")
        else:
            _work(work, out, timeout=timeout, keep_old=keep_old, yes=yes)
    found = collect(paths, work.config.ranks.local_ranks(), supervisor)
    out.data(found, *tables(found))


def _check_options(*, replace: bool, keep_old: bool, page_cache: bool) -> None:
    if replace and keep_old:
        raise UsageError("--replace frees what --keep-old would hold")
    if page_cache and (replace or keep_old):
        name = "--replace" if replace else "--keep-old"
        raise UsageError(f"{name} does not go with --page-cache, which only reads files")


def _work(
    work: "Warming", out: Output, *, timeout: float | None, keep_old: bool, yes: bool
) -> None:
    from wcache.rollout import warm_job, warm_plan

    plan = work.plan
    if plan.having("replace"):
        _ask(warm_plan.losses(plan, work.before), out, yes=yes)
    try:
        if plan.staged:
            out.say(warm_plan.engines(work.before[rank] for rank in plan.staged))
            _fail(work.stage(timeout), out, "nothing was switched: every rank serves what it did")
            work.switch(keep_old=keep_old)
        if plan.having("replace"):
            work.free()
        if plan.having("fill", "replace"):
            back = "; wcache warm --previous reads the old weights again"
            hint = "these ranks are empty: wcache warm tries again"
            _fail(
                work.fill(timeout), out, hint + (back if work.paths.previous_file.exists() else "")
            )
    except KeyboardInterrupt:
        out.say(
            "loading goes on, and nothing is switched that was not: wcache warm with the same"
            " options goes on with it, wcache rollback --drop gives it up"
        )
        raise typer.Exit(INTERRUPTED) from None
    now = view(work.paths, [one.rank for one in plan.ranks], work.supervisor)
    for line in warm_job.outcome(now):
        out.say(line)


def _fail(failures: dict[int, str], out: Output, hint: str) -> None:
    if not failures:
        return
    for line in told_together(failures.items()):
        out.error(line)
    out.hint(f"{hint}; wcache logs {min(failures)} shows more")
    raise typer.Exit(ExitCode.FAILED)


def _ask(losses: list[str], out: Output, *, yes: bool) -> None:
    """Says what ``--replace`` frees, and to whom it matters, before it is done."""
    for line in losses:
        out.warn(line)
    out.warn("no engine is attached, and none can attach until the new weights are loaded")
    if yes:
        return
    if not out.can_ask():
        raise UsageError(
            "--replace frees weights, and there is nobody to be asked", hint="--yes says so"
        )
    if not out.ask("free them?"):
        raise WcacheError("nothing was done")
