"""``wcache verify``: are the bytes that are served the right ones."""

from collections.abc import Sequence
from typing import Annotated

import typer

from wcache.commands.options import InstanceOption, JsonOption, QuietOption, RankArguments
from wcache.errors import ConfigError, NoSuchRankError, NotReadyError
from wcache.output import Output, Table
from wcache.ranks import chosen, read_config, select


def verify(
    ranks: RankArguments = None,
    instance: InstanceOption = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Map nothing: descriptors, manifest, files on disk.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check that the served weights are the right bytes.

    Computes the digest of every storage anew, where the weights are, after the quick checks: the
    manifest, the descriptors, the configuration, and the files on disk against those loaded. A
    checkpoint that is not on disk any more is a warning. Exits with 5 when anything is wrong.
    """
    from wcache.verify import Result, Verification, Verifier

    out = Output(as_json=as_json, quiet=quiet)
    paths, named = select(instance, ranks or [])
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

            def progress(done: int, total: int, label: str = label) -> None:
                bars.step(label, "digest", done, total)

            try:
                found = list(verifier.verify(paths.rank(rank), quick=quick, progress=progress))
            except (NotReadyError, NoSuchRankError) as error:
                if len(labels) == 1:
                    raise
                found = [Result(rank=rank, check="weights", result="skipped", detail=error.message)]
            results += found
            if not quick:
                bars.end(label, _outcome([result.result for result in found]))
    verification = Verification(
        instance=paths.instance, depth="quick" if quick else "digest", results=tuple(results)
    )
    table = Table("RANK", "CHECK", "RESULT", "DETAIL")
    for result in results:
        table.add(result.rank, result.check, result.result, result.detail)
    out.data(verification, table)
    raise typer.Exit(verification.exit_code)


def _outcome(results: Sequence[str]) -> str:
    for word in ("bad", "skipped"):
        if word in results:
            return word
    return "verified"
