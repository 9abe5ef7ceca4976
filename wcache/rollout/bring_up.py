"""Brings the ranks up that an engine asks for, before it is started."""

import os
from collections.abc import Mapping

from wcache.config import Config, DType, Loader
from wcache.engines.interface import Engine, Wish
from wcache.errors import MismatchError, UsageError, WcacheError
from wcache.hints import PUBLISHED_AFTER_DOWN
from wcache.output import Output, counted
from wcache.paths import InstancePaths
from wcache.ranks import rank_words, read_config
from wcache.rollout.lock import hold
from wcache.rollout.up_job import prepare
from wcache.rollout.wanted import Args
from wcache.supervise import supervisor_for

_DTYPES: Mapping[str, DType] = {
    "bfloat16": "bfloat16", "float16": "float16", "half": "float16",
    "float32": "float32", "float": "float32",
}  # fmt: skip
"""As engines have them; what is none of these is for the engine to refuse."""


def bring_up(engine: Engine, wish: Wish, paths: InstancePaths, out: Output) -> None:
    """``wcache up`` for what a command line asks for; waits until the ranks are ready.

    A wish without a model (a script knows it, the command line does not) starts what the
    configuration says. Raises :class:`UsageError` when there is none, :class:`WcacheError` when a
    rank fails, naming it, and :class:`MismatchError` when one goes on with other weights.
    """
    args = Args()
    if wish.model is None:
        check_configured(wish, paths, out)
    else:
        args = asked_for(engine, wish, read_config(paths))
    supervisor = supervisor_for(paths.instance)
    with hold(paths, "wcache run"):
        job = prepare(args, paths, supervisor, out)
        job.begin()
        try:
            failures = job.follow(None)
        except KeyboardInterrupt:
            job.leave()
            raise
        job.enable(failures)
    if failures:
        rank, reason = next(iter(failures.items()))
        raise WcacheError(f"rank {rank}: {reason}", hint=f"wcache logs {rank} shows more")
    if others := job.serving_others():
        raise MismatchError(
            f"{rank_words(others)} {'serves' if len(others) == 1 else 'serve'} other weights than"
            f" those of {job.config.model.path}",
            hint=PUBLISHED_AFTER_DOWN,
        )


def asked_for(engine: Engine, wish: Wish, old: Config | None) -> Args:
    """The options of ``wcache up`` for ``wish``, which has a model.

    A loader that is configured stays where ``engine`` can take what it makes: without it, nobody
    would fill the ranks after a reboot. So does the dtype, which was chosen for that model alone.
    """
    loaders = engine.loaders(wish)
    loader: Loader = loaders[0]
    dtype: DType | None = None
    if old is not None and old.model.loader in loaders:
        loader = old.model.loader
    if old is not None and loader != "publish":
        before = old.model.dtype if _is_model(wish.model, old) else None
        dtype = _DTYPES.get(wish.dtype or "", before)
    return Args(
        model=wish.model, revision=wish.revision, loader=loader, dtype=dtype,
        tp=wish.tp, pp=wish.pp, dp=wish.dp,
    )  # fmt: skip


def _is_model(name: str | None, config: Config) -> bool:
    if name is None or name == config.model.hub_id:
        return name is not None
    return os.path.realpath(name) == os.path.realpath(config.model.path)


def check_configured(wish: Wish, paths: InstancePaths, out: Output) -> None:
    """Raises :class:`UsageError` when nothing says which model; tells of ranks that do not fit."""
    config = read_config(paths)
    if config is None:
        name = f" --instance {paths.instance}" if paths.instance else ""
        raise UsageError(
            "the command does not say which model it takes, and none is configured",
            hint=f"wcache up{name} --model … first: --mode daemon brings that back from then on",
        )
    ranks = config.layout.tp * config.layout.pp * config.layout.dp
    if wish.ranks not in (1, ranks):
        are = "is" if ranks == 1 else "are"
        out.warn(
            f"the command starts {wish.ranks} processes, and {counted(ranks, 'rank')} {are}"
            " configured"
        )
