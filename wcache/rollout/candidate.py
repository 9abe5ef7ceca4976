"""From the options of ``warm`` to the configuration whose weights are to be served."""

import shlex
from dataclasses import replace

import msgspec

from wcache.checkpoint import Checkpoint, IdentityCache
from wcache.config import Config
from wcache.errors import MismatchError, UsageError, WcacheError
from wcache.machine import devices
from wcache.paths import InstancePaths
from wcache.rollout import previous as previous_config
from wcache.rollout.wanted import Args, Wanted, from_config, from_model

_PUBLISHED = "wcache up --model … makes them weights that are read from a checkpoint"


def candidate(args: Args, old: Config, paths: InstancePaths, *, previous: bool) -> Wanted:
    """The configuration that is to be met, with its checkpoint if that had to be looked at.

    Layout, memory and access are those of ``old``: other ones need other ranks, and ``wcache up``.
    So is the loader: engines could not take what another one makes.
    Raises :class:`WcacheError` when there is none that ``warm`` can meet.
    """
    if previous:
        return Wanted(config=_previous(args, old, paths), checkpoint=None)
    if old.model.loader == "publish":
        raise WcacheError(
            "the first engine publishes the weights of this instance: there is nothing to read",
            hint=_PUBLISHED,
        )
    identities = IdentityCache(paths.identity_folder)
    if not _names_weights(args):
        return _as_configured(old, identities)
    if args.model is None and args.revision is not None and old.model.hub_id is None:
        raise UsageError(
            "--revision needs --model",
            hint=f"the configured model is a folder and has no revisions: {old.model.path}",
        )
    return _chosen(args, old, identities)


def _names_weights(args: Args) -> bool:
    """An empty word names some too: a script's variable was not set, and the default not meant."""
    said = (args.model, args.revision, args.dtype, args.quantization)
    return any(one is not None for one in said)


def _as_configured(old: Config, identities: IdentityCache) -> Wanted:
    if old.model.content is not None:
        return Wanted(config=old, checkpoint=None)
    # Without it any checkpoint would do: a doubt is a mismatch.
    found = from_config(old).checkpoint
    assert found is not None
    model = msgspec.structs.replace(old.model, content=identities.identify(found).digest)
    return Wanted(config=msgspec.structs.replace(old, model=model), checkpoint=found)


def _chosen(args: Args, old: Config, identities: IdentityCache) -> Wanted:
    """What was not said stays as it is configured."""
    model, revision = args.model, args.revision
    if model is None:
        model = old.model.hub_id or old.model.path
        revision = revision or old.model.revision
    filled: Args = replace(
        args,
        model=model,
        revision=revision,
        loader=old.model.loader,
        dtype=args.dtype or old.model.dtype,
        quantization=args.quantization or old.model.quantization,
        device=old.memory.device,
        **msgspec.structs.asdict(old.layout),
    )
    visible = devices.visible_gpus() if old.memory.device == "cuda" else ()
    return from_model(filled, model, old, visible, identities=identities)


def _previous(args: Args, old: Config, paths: InstancePaths) -> Config:
    if _names_weights(args):
        raise UsageError("--previous names the weights already: leave the other options out")
    file = paths.previous_file
    found = previous_config.load(paths)
    if found is None:
        raise WcacheError(
            "there is no previous configuration", hint=f"a switch to other weights writes {file}"
        )
    if (found.layout, found.memory) != (old.layout, old.memory):
        named = shlex.quote(found.model.hub_id or found.model.path)
        raise WcacheError(
            f"the previous configuration has another layout or memory: {file}",
            hint=f"wcache up --model {named} … takes both",
        )
    return msgspec.structs.replace(found, access=old.access)


def checkpoint_of(wanted: Wanted, paths: InstancePaths) -> Checkpoint:
    """The checkpoint to load; raises :class:`MismatchError` when it is not the one that the
    configuration was written for."""
    if wanted.checkpoint is not None:
        return wanted.checkpoint
    try:
        identities = IdentityCache(paths.identity_folder)
        found = from_config(wanted.config, identities=identities).checkpoint
    except MismatchError as error:
        named = shlex.quote(wanted.config.model.path)
        error.hint = f"wcache warm --model {named} takes what is there now"
        raise
    if found is None:
        raise WcacheError("what an engine publishes can not be read", hint=_PUBLISHED)
    return found
