"""``wcache status``: which ranks are ready, with what, and who uses them."""

import typer

from wcache.commands import gpu_memory
from wcache.commands.options import InstanceOption, JsonOption, RankArguments
from wcache.commands.overview import collect, next_step, problem_lines, tables
from wcache.output import Output
from wcache.ranks import chosen, select


def status(
    ranks: RankArguments = None, instance: InstanceOption = "", as_json: JsonOption = False
) -> None:
    """Show which ranks are ready, with what, and who uses them.

    Exits with 0 when every rank is ready with the weights that the configuration wants, 1 when
    they are but no supervisor keeps them over a crash, 3 when one is not ready, 4 when there is no
    such rank, 5 when one serves other weights, 75 when the supervisor does not answer, 78 when the
    configuration can not be read.
    """
    from wcache.supervise import supervisor_for

    paths, named = select(instance, ranks or [])
    wanted = chosen(paths, named)
    found = collect(paths, wanted, supervisor_for(paths.instance))
    out = Output(as_json=as_json, instance=paths.instance)
    out.data(found, *tables(found))
    if not as_json:
        out.say(found.headline)
        if note := gpu_memory.note(found.gpus):
            out.say(note)
        for problem in problem_lines(found):
            out.warn(problem)
        if advice := next_step(found):
            out.hint(advice)
    raise typer.Exit(found.exit_code)
