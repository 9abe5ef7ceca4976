"""Arguments that several commands take."""

import re
from typing import Annotated

import typer

from wcache.errors import UsageError
from wcache.paths import check_instance_name


def _instance(context: typer.Context, name: str) -> str:
    """Not given is the default instance; given and empty is a variable that a script has not set,
    and no reason to do to the default instance what was meant for another."""
    source = context.get_parameter_source("instance")
    is_given = source is not None and source.name == "COMMANDLINE"
    return check_instance_name(name) if is_given else name


InstanceOption = Annotated[
    str,
    typer.Option(
        "--instance",
        metavar="NAME",
        callback=_instance,
        help="A named instance; without it the default one.",
    ),
]
RankArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RANK]...", help="Ranks, as 3 or NAME:3; without any, all of them."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Say nothing but results, warnings and errors.")
]
TpOption = Annotated[
    int | None, typer.Option("--tp", metavar="N", help="Tensor-parallel size. [default: 1]")
]
PpOption = Annotated[
    int | None, typer.Option("--pp", metavar="N", help="Pipeline-parallel size. [default: 1]")
]
DpOption = Annotated[
    int | None, typer.Option("--dp", metavar="N", help="Data-parallel size. [default: 1]")
]
NnodesOption = Annotated[
    int | None, typer.Option("--nnodes", metavar="N", help="Number of nodes. [default: 1]")
]
RevisionOption = Annotated[
    str | None,
    typer.Option("--revision", metavar="REV", help="Branch, tag or commit on the hub."),
]

_SIZE = re.compile(r"([1-9][0-9]{0,15})(|KiB|MiB|GiB|TiB)")
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_size(text: str) -> int:
    """``1GiB``, ``512MiB`` or plain bytes; raises :class:`UsageError`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"not a size: {text!r}", hint="sizes are written 1GiB, 512MiB or in bytes")
    return int(match[1]) * _UNITS[match[2]]
