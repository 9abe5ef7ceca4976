"""From the options of ``up`` to the configuration that it writes."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from wcache import gate
from wcache.checkpoint import Checkpoint, Identity, IdentityCache, identify, open_checkpoint
from wcache.config import (
    AccessSection,
    Config,
    Device,
    DType,
    LayoutSection,
    Loader,
    MemorySection,
    ModelSection,
    Quantization,
    check_config,
)
from wcache.errors import MismatchError, UsageError, WcacheError
from wcache.hub import ResolvedModel, resolve_model
from wcache.layout import Layout
from wcache.machine.devices import VISIBLE, Gpu
from wcache.output import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Args:
    """What this call of ``up`` was asked for; None where it was not said."""

    model: str | None = None
    revision: str | None = None
    dtype: DType | None = None
    quantization: Quantization | None = None
    loader: Loader | None = None
    device: Device | None = None
    slab_bytes: int | None = None
    hugepages: bool | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    nnodes: int | None = None
    node_rank: int | None = None

    @property
    def layout(self) -> LayoutSection:
        """Raises :class:`UsageError` for sizes that do not fit together, naming the options."""
        names = [field.name for field in msgspec.structs.fields(LayoutSection)]
        said = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        section = LayoutSection(**said)
        problems = list(Layout(**msgspec.structs.asdict(section)).problems())
        if problems:
            raise UsageError("; ".join(f"{option(name)} {text}" for name, text in problems))
        return section

    def check(self) -> None:
        """Raises :class:`UsageError` when something but the model was given."""
        said = [name for name in self.__slots__ if getattr(self, name) is not None]
        if self.model is None and said:
            raise UsageError(
                f"{option(said[0])} needs --model",
                hint="without --model, wcache up starts what the configuration says",
            )
        decided = [name for name in ("revision", "dtype", "quantization") if name in said]
        if self.loader == "publish" and decided:
            raise UsageError(
                f"{option(decided[0])} does not go with --loader publish",
                hint="the engine that publishes decides on it",
            )


def option(name: str) -> str:
    """``node_rank`` is given as ``--node-rank``."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A configuration, and the checkpoint that it is about."""

    config: Config
    checkpoint: Checkpoint | None
    """None where an engine publishes."""
    identity: Identity | None = None
    """Of ``checkpoint``; None where it was not asked for."""


def from_model(
    args: Args,
    model: str,
    old: Config | None,
    visible: Sequence[Gpu],
    *,
    identities: IdentityCache | None = None,
    download: bool = True,
) -> Wanted:
    """The configuration for ``args``; what they can not say is kept from ``old``.

    ``visible`` are the GPUs to choose from, in order. Without ``download`` a hub id must be in the
    local cache.
    """
    layout = args.layout
    loader: Loader = args.loader or "safetensors"
    checkpoint = identity = None
    if loader == "publish":
        section = ModelSection(path=model, loader=loader)
    else:
        resolved = resolve_model(model, args.revision, download=download)
        checkpoint = resolved.open()
        gate.check(checkpoint)
        identity = _identify(checkpoint, identities)
        section = _model(args, resolved, identity)
    before = old.memory if old else MemorySection()
    memory = MemorySection(
        device=args.device or ("cuda" if visible else "cpu"),
        slab_bytes=args.slab_bytes or before.slab_bytes,
        hugepages=before.hugepages if args.hugepages is None else args.hugepages,
    )
    if memory.device == "cuda":
        ranks = Layout(**msgspec.structs.asdict(layout)).ranks_per_node
        memory = msgspec.structs.replace(memory, devices=_gpus(before, ranks, visible))
    config = Config(
        model=section,
        layout=layout,
        memory=memory,
        access=old.access if old else AccessSection(),
    )
    config = check_config(config, source="wcache up")
    return Wanted(config=config, checkpoint=checkpoint, identity=identity)


def from_config(config: Config, *, identities: IdentityCache | None = None) -> Wanted:
    """What a configuration that is there already asks for.

    Raises :class:`MismatchError` when the checkpoint is not the one it was written for, and what
    :func:`wcache.gate.check` raises.
    """
    if config.model.loader == "publish":
        return Wanted(config=config, checkpoint=None)
    checkpoint = open_checkpoint(Path(config.model.path))
    gate.check(checkpoint)
    content = config.model.content
    if content is not None and _identify(checkpoint, identities).digest != content:
        named = shlex.quote(config.model.path)
        raise MismatchError(
            f"{config.model.path} is not the checkpoint that the configuration was written for",
            hint=f"if it was changed on purpose: wcache up --model {named} …",
        )
    return Wanted(config=config, checkpoint=checkpoint)


def why_not_again(config: Config, identities: IdentityCache) -> str:
    """Why weights that were loaded by ``config`` could not be loaded again; empty if they could."""
    try:
        from_config(config, identities=identities)
    except WcacheError as error:
        hint = f"; {error.hint}" if error.hint else ""
        return f"lost weights could not be loaded again: {error.message}{hint}"
    return ""


def _identify(checkpoint: Checkpoint, identities: IdentityCache | None) -> Identity:
    return identify(checkpoint) if identities is None else identities.identify(checkpoint)


def _model(args: Args, resolved: ResolvedModel, identity: Identity) -> ModelSection:
    return ModelSection(
        path=str(resolved.path),
        hub_id=resolved.hub_id,
        revision=resolved.revision,
        content=identity.digest,
        loader=args.loader or "safetensors",
        dtype=args.dtype or "auto",
        quantization=args.quantization or "auto",
    )


def _gpus(before: MemorySection, ranks: int, visible: Sequence[Gpu]) -> tuple[str, ...]:
    """UUIDs by local rank: those of before where they still do, so that weights need not move.

    An operator who shows the same GPUs in another order has said which rank belongs where.
    """
    uuids = [gpu.uuid for gpu in visible]
    if VISIBLE in os.environ and len(uuids) == ranks and set(before.devices) == set(uuids):
        return tuple(uuids)
    if len(before.devices) == ranks and set(before.devices) <= set(uuids):
        return before.devices
    if len(uuids) < ranks:
        raise WcacheError(
            f"{counted(ranks, 'rank')} on this node and {counted(len(uuids), 'GPU')} visible,"
            " each rank needs one",
            hint="lower --tp, --pp or --dp, spread them with --nnodes, or look at"
            " CUDA_VISIBLE_DEVICES and nvidia-smi"
            if uuids
            else "--device cpu keeps weights in host memory; where there are GPUs, look at"
            " CUDA_VISIBLE_DEVICES and nvidia-smi",
        )
    return tuple(uuids[:ranks])
