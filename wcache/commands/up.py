"""``wcache up``: one command from a model's name to weights that engines can attach to."""

from typing import Annotated

import typer

from wcache.commands.options import (
    DpOption,
    InstanceOption,
    NnodesOption,
    PpOption,
    QuietOption,
    RevisionOption,
    TpOption,
    parse_size,
)
from wcache.commands.overview import collect, problem_lines, tables
from wcache.config import Device, DType, Loader, Quantization
from wcache.errors import ExitCode, NotReadyError, UsageError
from wcache.machine.permissions import may_exist
from wcache.output import Output
from wcache.paths import InstancePaths
from wcache.ranks import told_together
from wcache.rollout.lock import hold

INTERRUPTED = 130


def up(
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="PATH|HUB_ID", help="Checkpoint folder or hub id."),
    ] = None,
    tp: TpOption = None,
    pp: PpOption = None,
    dp: DpOption = None,
    ep: Annotated[
        int | None,
        typer.Option(
            "--ep", metavar="N", help="Expert-parallel size, divides tp * dp. [default: 1]"
        ),
    ] = None,
    nnodes: NnodesOption = None,
    node_rank: Annotated[
        int | None,
        typer.Option("--node-rank", metavar="N", help="Which node this is. [default: 0]"),
    ] = None,
    dtype: Annotated[
        DType | None,
        typer.Option("--dtype", help="Of floating-point weights; auto keeps the checkpoint's."),
    ] = None,
    quantization: Annotated[
        Quantization | None,
        typer.Option(
            "--quantization",
            help="fp8: linear layers in blocks of 128x128, made on load; auto keeps the"
            " checkpoint's.",
        ),
    ] = None,
    revision: RevisionOption = None,
    device: Annotated[
        Device | None,
        typer.Option(
            "--device", help="Where weights are kept. [default: cuda where there are GPUs]"
        ),
    ] = None,
    instance: InstanceOption = "",
    loader: Annotated[
        Loader | None,
        typer.Option(
            "--loader",
            help="publish: the first engine hands over what it has loaded. vllm: its own code.",
        ),
    ] = None,
    slab_bytes: Annotated[
        str | None,
        typer.Option(
            "--slab-bytes", metavar="SIZE", help="Size of one allocation. [default: 1GiB]"
        ),
    ] = None,
    hugepages: Annotated[
        bool | None,
        typer.Option("--hugepages/--no-hugepages", help="2 MiB pages on the CPU where free."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0.1, metavar="SECONDS", help="Give up waiting, not loading."),
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Load a model's weights and keep them. Writes the configuration, so a reboot brings them back.

    Without --model, starts what the configuration says. Ranks that hold the wanted weights are
    left alone. Other weights are loaded beside the old, which are freed once all ranks have the new
    ones and switch; refused while engines use the old ones. Exits with 5 where the first engine
    publishes and ranks go on with other weights than the wanted ones.
    """
    from wcache.rollout.up_job import GOES_ON, prepare
    from wcache.rollout.wanted import Args
    from wcache.supervise import supervisor_for, units_missing, units_unused

    args = Args(
        model=model, revision=revision, dtype=dtype, quantization=quantization, loader=loader,
        device=device,
        slab_bytes=None if slab_bytes is None else parse_size(slab_bytes), hugepages=hugepages,
        tp=tp, pp=pp, dp=dp, ep=ep, nnodes=nnodes, node_rank=node_rank,
    )  # fmt: skip
    args.check()
    paths = InstancePaths.of(instance)
    _check_name(paths)
    supervisor = supervisor_for(paths.instance)
    out = Output(quiet=quiet, instance=instance)
    if supervisor.kind == "direct" and units_missing():
        out.say("systemd is not asked: wcache install gives it the units, and a reboot the weights")
    elif units_unused(supervisor):
        out.say(
            "systemd is not asked: wcache's own supervisor keeps these ranks until wcache down, and"
            " no boot starts that one"
        )
    with hold(paths, "wcache up"):
        job = prepare(args, paths, supervisor, out)
        job.begin()
        try:
            failures = job.follow(timeout)
        except NotReadyError as error:
            job.enable()  # loading goes on
            if job.beside:
                error.hint = f"loading goes on, and nothing is switched: {GOES_ON}"
            raise
        except KeyboardInterrupt:
            job.leave()
            raise typer.Exit(INTERRUPTED) from None
        job.enable(failures)
        if not failures:
            job.stop_leaving()
        others = job.serving_others()
    found = collect(paths, job.config.ranks.local_ranks(), supervisor)
    out.data(found, *tables(found))
    for line in told_together(failures.items()):
        out.error(line)
    if not failures:
        # Weights that are there may still be kept by nobody.
        for problem in problem_lines(found):
            out.warn(problem)
    if failures:
        stay = (
            "ranks that served other weights serve them on"
            if job.beside
            else "ranks that are ready stay ready"
        )
        out.hint(f"wcache logs {min(failures)} shows more; {stay}")
        raise typer.Exit(ExitCode.FAILED)
    if others:
        raise typer.Exit(ExitCode.MISMATCH)  # said with its remedy already


def _check_name(paths: InstancePaths) -> None:
    """Raises :class:`UsageError` for an instance that would begin as ``default``.

    It would be another one beside the default instance, with another copy of the weights. One that
    is there already is left alone: it may hold weights.
    """
    if paths.instance == "default" and not may_exist(paths.config_file):
        raise UsageError(
            "an instance can not be named 'default': the one without a name is called so",
            hint="leave --instance out for the default instance",
        )
