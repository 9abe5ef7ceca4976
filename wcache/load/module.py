"""``wcache.publish``: hands the weights of a module that was built elsewhere to a rank's daemon."""

import secrets
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

import msgspec
import torch

from wcache import switches as switch_table
from wcache.config import Config
from wcache.errors import MismatchError, TryAgainError, UsageError, WcacheError
from wcache.fingerprint import Fingerprint, held_from
from wcache.load.harvest import Harvest, harvest, quantization_of
from wcache.load.order import PUBLISH_S, ask_load
from wcache.load.publish import (
    check_memory,
    device_facts,
    digested,
    made_slabs,
    publish_slabs,
    rank_memory,
)
from wcache.load.report import Conversation, ProgressReport, failure_told
from wcache.manifest import Manifest, Storage
from wcache.memory.dtypes import TORCH_DTYPES
from wcache.memory.slab import Access, Memory, Slab
from wcache.paths import RankId, RankPaths, rank_meant
from wcache.protocol.control import Control
from wcache.protocol.messages import NothingToLoad

# The bytes of these as JSON; a manifest is read whole by every client.
MAX_EXTRAS_BYTES = 16 << 20


def publish(
    module: torch.nn.Module,
    *,
    rank: int | None = None,
    instance: str | None = None,
    model: str | None = None,
    extras: dict[str, Any] | None = None,
    engine: str | None = None,
    engine_version: str | None = None,
    switches: Mapping[str, object] | None = None,
) -> int:
    """Copies every parameter, buffer and plain tensor attribute of ``module`` into a rank's memory.

    Returns the number of the generation that is served from then on. ``rank`` and ``instance``
    default as in :func:`wcache.attach`. The configuration of the instance must say
    ``loader = "publish"``. The module stays as it is, and may live on any device; whole storages
    are copied (:func:`wcache.load.harvest.harvest`).

    ``model`` is what the caller believes to publish: when it is given it must be the
    ``model.path`` of the configuration. ``extras`` is JSON-able Python state for the engines that
    attach, by dotted name. ``engine``, ``engine_version`` and ``switches`` become part of the
    fingerprint: ``switches`` are settings that change the layout of the weights, by name, beside
    the engine's environment variables, which are found here (:mod:`wcache.switches`).

    Raises :class:`UsageError` for extras or switches that can not be told, :class:`WcacheError`
    when the module has tensors that can not be mapped or the daemon takes no weights from an
    engine, :class:`wcache.errors.UnsupportedQuantForIPCError` when the module tells of a
    quantization that can not be kept, :class:`MismatchError` for another model,
    :class:`wcache.errors.OutOfMemoryError` before anything is copied, and
    :class:`wcache.errors.TryAgainError` when somebody else publishes or the daemon goes away.
    """
    rank_id = rank_meant(rank, instance)
    quantization = quantization_of(module)
    taken = harvest(module)
    kept = _checked_extras(extras or {})
    set_here = switch_table.set_here(engine, switches)
    with Control.connect(RankPaths.of(rank_id), "loader") as control:
        control.channel.settimeout(PUBLISH_S)
        try:
            order = ask_load(control, "engine")
            if isinstance(order, NothingToLoad):
                raise WcacheError(
                    f"rank {rank_id} takes no weights now: {order.message}",
                    hint="attach to what it holds, or free that first: wcache down",
                )
            with failure_told(control):
                config = _checked_config(order.config, rank_id, model)
                known = {
                    "architecture": type(module).__name__,
                    "dtype": _main_dtype(taken),
                    "quantization": quantization,
                    "engine": engine,
                    "engine_version": engine_version,
                }
                memory = rank_memory(config, rank_id.rank)
                found = held_from(config, rank_id.rank, **known, **device_facts(memory))
                found = msgspec.structs.replace(found, switches=set_here)
                return publish_harvest(control, config, rank_id, taken, found, memory, kept)
        except (ConnectionError, TimeoutError) as error:
            raise TryAgainError(
                f"the daemon of rank {rank_id} went away while it was published to: {error}"
            ) from None


def publish_harvest(
    control: Conversation,
    config: Config,
    rank_id: RankId,
    taken: Harvest,
    fingerprint: Fingerprint,
    memory: Memory,
    extras: dict[str, Any],
) -> int:
    """The part of :func:`publish` after the daemon's order: copy, digest, hand over."""
    progress = ProgressReport(control)
    sizes = check_memory(config, memory, rank_id.rank, taken.total_bytes)
    progress.begin("allocate", sum(sizes))
    with made_slabs(memory, sizes, progress.advance) as slabs:
        storages = _copy(taken, memory, slabs, progress)
        progress.begin("publish", 0)
        manifest = Manifest(
            id=secrets.token_hex(16),
            fingerprint=fingerprint,
            slabs=tuple(slab.info for slab in slabs),
            storages=storages,
            tensors=taken.tensors,
            extras=extras,
        )
        return publish_slabs(control, memory, slabs, manifest)


def _copy(
    taken: Harvest, memory: Memory, slabs: list[Slab], progress: ProgressReport
) -> tuple[Storage, ...]:
    mapping = memory.map(slabs, Access.WRITE)
    try:
        content = mapping.tensor()
        progress.begin("read", taken.weight_bytes)
        done = 0
        for source in taken.sources:
            content[source.offset : source.offset + source.nbytes].copy_(source.content())
            done += source.nbytes
            progress.advance(done)
        progress.begin("digest", taken.weight_bytes)
        spans = [(source.offset, source.nbytes) for source in taken.sources]
        return digested(content, spans, progress.advance)
    finally:
        mapping.close()


def _checked_config(config: Config, rank_id: RankId, model: str | None) -> Config:
    if config.model.loader != "publish":
        raise WcacheError(
            f"rank {rank_id} loads {config.model.path} itself and takes no weights from an engine",
            hint='set loader = "publish" in its configuration',
        )
    if model is not None and model != config.model.path:
        raise MismatchError(
            f"rank {rank_id} waits for the model {config.model.path!r}, this is {model!r}"
        )
    return config


def _checked_extras(extras: dict[str, Any]) -> dict[str, Any]:
    """``extras`` as a client will read it back; raises :class:`UsageError` if that is not equal."""
    try:
        data = msgspec.json.encode(extras)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"extras can not be written as JSON: {error}") from None
    if len(data) > MAX_EXTRAS_BYTES:
        raise UsageError(f"extras have {len(data)} bytes, at most {MAX_EXTRAS_BYTES} are taken")
    read = msgspec.json.decode(data, type=dict[str, Any])
    if read != extras:
        raise UsageError(
            "extras would not come back as they are",
            hint="only bool, int, finite float, str, None, and lists and dicts of them",
        )
    return read


def _main_dtype(taken: Harvest) -> str | None:
    """The floating dtype of most bytes of parameters, as torch names it."""
    nbytes: Counter[str] = Counter()
    for tensor in taken.tensors:
        dtype = TORCH_DTYPES[tensor.dtype]
        if tensor.kind == "parameter" and tensor.tied_to is None and dtype.is_floating_point:
            nbytes[str(dtype).removeprefix("torch.")] += prod(tensor.shape) * dtype.itemsize
    return max(nbytes, key=lambda name: nbytes[name]) if nbytes else None
