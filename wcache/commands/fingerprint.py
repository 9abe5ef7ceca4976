"""``wcache fingerprint``: what weights are, and in which fields others are not the same."""

from pathlib import Path
from typing import Annotated

import typer

from wcache.commands.options import (
    DpOption,
    InstanceOption,
    JsonOption,
    NnodesOption,
    PpOption,
    QuietOption,
    RevisionOption,
    TpOption,
)
from wcache.config import Device, DType, Quantization
from wcache.errors import ExitCode, UsageError
from wcache.output import Output
from wcache.ranks import select

SHOWN_FILES = 5


def fingerprint(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Checkpoint folder, hub id, or a file fingerprint.json."
        ),
    ],
    tp: TpOption = None,
    pp: PpOption = None,
    dp: DpOption = None,
    ep: Annotated[
        int | None, typer.Option("--ep", metavar="N", help="Expert-parallel size. [default: 1]")
    ] = None,
    nnodes: NnodesOption = None,
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", metavar="N", help="Which node. [default: 0]")
    ] = None,
    dtype: Annotated[DType | None, typer.Option("--dtype", help="As in wcache up.")] = None,
    quantization: Annotated[
        Quantization | None, typer.Option("--quantization", help="As in wcache up.")
    ] = None,
    revision: RevisionOption = None,
    device: Annotated[
        Device | None, typer.Option("--device", help="Where weights would be kept.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank", min=0, metavar="N", help="Of which rank. [default: 0, or that of --running]"
        ),
    ] = None,
    diff: Annotated[
        str | None,
        typer.Option("--diff", metavar="OTHER", help="Compare with another model or file."),
    ] = None,
    running: Annotated[
        str | None,
        typer.Option("--running", metavar="RANK", help="Compare with what a rank serves, as 3."),
    ] = None,
    instance: InstanceOption = "",
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Print the fingerprint of a model's weights, or compare it with another.

    It is that of the weights that wcache up with these options would load. With --diff or
    --running, prints the fields in which two fingerprints differ, and exits with 5 when the weights
    are not the same; options are those of both models. A rank that runs has its own in the run
    folder, as RANK/fingerprint.json.
    """
    from wcache.commands.comparison import compared, fields, rows
    from wcache.commands.sources import Source, is_file, of_file, of_model, of_running
    from wcache.rollout.wanted import Args

    if diff is not None and running is not None:
        raise UsageError(
            "--diff and --running do not go together", hint="one other is compared at a time"
        )
    paths, ranks = select(instance, [] if running is None else [running])
    args = Args(
        revision=revision, dtype=dtype, quantization=quantization, device=device, tp=tp, pp=pp,
        dp=dp, ep=ep, nnodes=nnodes, node_rank=node_rank,
    )  # fmt: skip
    if args != Args() and all(is_file(name) for name in (model, diff) if name is not None):
        raise UsageError(
            "a fingerprint that is read from a file takes no options of a model",
            hint="give the folder of the checkpoint instead",
        )
    out = Output(as_json=as_json, quiet=quiet)
    of_rank = rank if rank is not None else (ranks or [0])[0]

    def source(name: str) -> Source:
        if is_file(name):
            return of_file(Path(name).expanduser())
        is_compared = running is not None or diff is not None
        return of_model(args, name, of_rank, paths, out, is_compared=is_compared)

    # First: it costs nothing, and it may not be there.
    serving = of_running(paths, ranks[0]) if ranks else None
    this = source(model)
    other = serving if diff is None else source(diff)
    if other is None:
        out.data(this.fingerprint, fields(this.fingerprint))
        return
    found = compared(this, other)
    out.data(found, rows(found))
    out.say(f"this is {this.name}, other is {other.name}")
    out.say("the weights are the same" if found.same else "the weights are not the same")
    if found.files:
        more = f" and {len(found.files) - SHOWN_FILES} more" if found.files[SHOWN_FILES:] else ""
        out.say(f"files that differ: {', '.join(found.files[:SHOWN_FILES])}{more}")
    if found.same_layout:
        out.say("of the same layout: fine-tuned, or copied without their times (cp -p keeps them)")
    raise typer.Exit(ExitCode.DONE if found.same else ExitCode.MISMATCH)
