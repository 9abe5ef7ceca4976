"""``wcache verify``: are the bytes that are served the right ones."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from wcache.commands.options import InstanceOption, JsonOption, QuietOption, RankArguments
from wcache.errors import ConfigError, ExitCode, NoSuchRankError, NotReadyError, UsageError
from wcache.machine import open_files
from wcache.output import Output, Table
from wcache.ranks import chosen, not_up, read_config, select

if TYPE_CHECKING:
    from wcache.verify import Depth, Result


def verify(
    ranks: RankArguments = None,
    instance: InstanceOption = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Map nothing: descriptors, manifest, files on disk.")
    ] = False,
    parity: Annotated[
        bool,
        typer.Option(
            "--parity", help="Compare every tensor with a fresh load from disk, then logits."
        ),
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Read what is damaged from disk again, into a new generation."
        ),
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check that the served weights are the right bytes.

    Computes the digest of every storage anew, where the weights are, after the quick checks: the
    manifest, the descriptors, the configuration, and the files on disk against those loaded. A
    checkpoint that is not on disk any more is a warning. Exits with 5 when anything is wrong, with
    1 when a check could not be made, and with 3 where a rank is not up or has no weights.
    """
    from wcache.verify import Result, Verification, Verifier

    open_files.raise_limit()
    depth = _depth(quick=quick, parity=parity, repair=repair)
    paths, named = select(instance, ranks or [])
    out = Output(as_json=as_json, quiet=quiet, instance=paths.instance)
    wanted = chosen(paths, named)
    try:
        config = read_config(paths)
    except ConfigError as error:
        config = None
        for problem in error.problems or (error.message,):
            out.warn(problem)
    verifier = Verifier(config)
    labels = {rank: f"rank {rank}" for rank in wanted}
    results: list[Result] = []
    with out.bars([] if quick else list(labels.values())) as bars:
        for rank, label in labels.items():

            def progress(phase: str, done: int, total: int, label: str = label) -> None:
                bars.step(label, phase, done, total)

            try:
                found = list(verifier.verify(paths.rank(rank), depth=depth, progress=progress))
            except (NotReadyError, NoSuchRankError) as error:
                if len(labels) == 1 and error.exit_code == ExitCode.NO_SUCH_RANK:
                    raise not_up([rank]) from None  # it is known, by chosen()
                if len(labels) == 1:
                    raise
                found = [Result(rank=rank, check="weights", result="skipped", detail=error.message)]
            results += found
            if not quick:
                bars.end(label, _outcome(found))
    verification = Verification(instance=paths.instance, depth=depth, results=tuple(results))
    table = Table("RANK", "CHECK", "RESULT", "DETAIL")
    for result in results:
        table.add(result.rank, result.check, result.result, result.detail)
    out.data(verification, table)
    if depth != "repair" and any((one.check, one.result) == ("digests", "bad") for one in results):
        out.hint("wcache verify --repair reads what is damaged from disk again")
    raise typer.Exit(verification.exit_code)


def _depth(*, quick: bool, parity: bool, repair: bool) -> "Depth":
    if quick + parity + repair > 1:
        raise UsageError("--quick, --parity and --repair are three different checks: choose one")
    if quick:
        return "quick"
    if parity:
        return "parity"
    return "repair" if repair else "digest"


def _outcome(results: "Sequence[Result]") -> str:
    # Logits can not always be had, and all else is as good without them.
    found = {one.result for one in results if (one.check, one.result) != ("logits", "skipped")}
    for word in ("bad", "skipped"):
        if word in found:
            return word
    return "verified"
