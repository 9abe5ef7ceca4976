"""Brings the ranks up that an engine asks for, before it is started."""

from wcache.commands.job import prepare
from wcache.commands.lock import hold
from wcache.commands.wanted import Args
from wcache.engines.interface import Engine, Wish
from wcache.errors import WcacheError
from wcache.output import Output
from wcache.paths import InstancePaths
from wcache.supervise import supervisor_for


def bring_up(engine: Engine, wish: Wish, paths: InstancePaths, out: Output) -> None:
    """``wcache up`` for what a command line asks for; waits until the ranks are ready.

    A wish without a model (a script knows it, the command line does not) starts what the
    configuration says. Raises :class:`WcacheError` when a rank fails, naming it.
    """
    args = Args()
    if wish.model is not None:
        args = Args(
            model=wish.model, revision=wish.revision, loader=engine.loader(wish),
            tp=wish.tp, pp=wish.pp, dp=wish.dp,
        )  # fmt: skip
    supervisor = supervisor_for(paths.instance)
    with hold(paths, "wcache run"):
        job = prepare(args, paths, supervisor, out)
        job.begin()
        failures = job.follow(None)
        job.enable(failures)
    if failures:
        rank, reason = next(iter(failures.items()))
        raise WcacheError(f"rank {rank}: {reason}", hint=f"wcache logs {rank} shows more")
