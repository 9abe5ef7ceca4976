"""Publish on first load: moves the weights of a loaded model into a rank's slabs, and the model's
own parameters after them."""

import contextlib
import secrets
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from wcache.client import Attachment
from wcache.client.slots import Tree
from wcache.engines.vllm.wanted import Wanted, is_same_model
from wcache.errors import MismatchError, TryAgainError, UsageError, WcacheError
from wcache.fingerprint import Fingerprint, compare, held_from
from wcache.load.harvest import Source, harvest, quantization_of
from wcache.load.order import PUBLISH_S, ask_load
from wcache.load.publish import digested, publish_slabs, rank_memory
from wcache.load.report import ProgressReport
from wcache.manifest import STORAGE_ALIGNMENT, Manifest, Storage, Tensor
from wcache.memory.dtypes import TORCH_DTYPES
from wcache.memory.slab import Access, Memory, Slab
from wcache.paths import RankId, RankPaths
from wcache.protocol.control import Control, SilentDaemonError
from wcache.protocol.messages import MAX_FDS_PER_TRANSFER, LoadOrder, NothingToLoad


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to publish, which nobody else has while the connection is open."""

    control: Control
    order: LoadOrder


def claim(wanted: Wanted, model_config: Any) -> Claim | None:
    """Asks an empty daemon to be the one that publishes; None when it is not empty any more.

    Raises :class:`MismatchError` when the daemon waits for another model or layout,
    :class:`TryAgainError` while somebody else publishes or when the daemon ends meanwhile,
    :class:`SilentDaemonError` when it does not answer, and
    :class:`wcache.protocol.control.RefusedError` when its weights come from a loader.
    """
    control = Control.connect(RankPaths.of(wanted.rank), "loader")
    try:
        order = ask_load(control, "engine")
        if isinstance(order, NothingToLoad):
            control.close()
            return None
        _check_order(order, wanted, model_config)
        control.channel.settimeout(PUBLISH_S)
    except TimeoutError:
        control.close()
        raise SilentDaemonError(f"daemon of rank {wanted.rank} does not answer") from None
    except OSError as error:
        control.close()
        raise TryAgainError(
            f"daemon of rank {wanted.rank} ended while it was asked: {error}"
        ) from None
    except BaseException:
        control.close()
        raise
    return Claim(control, order)


def publish(
    claimed: Claim, model: torch.nn.Module, extras: Mapping[str, Any], wanted: Wanted
) -> int:
    """Hands every tensor of ``model`` on the rank's device over; returns the generation's number.

    Slab by slab: one is made and filled, the parameters that were copied into it are pointed at it,
    and what they had before is freed. So at no time more is used than the weights, one slab and the
    largest weight. The model computes the same before, after and, should this raise, in between.
    """
    quantization_of(model)  # raises for what the gate does not keep
    config = claimed.order.config
    memory = rank_memory(config, wanted.rank.rank)
    taken = harvest(model, device_type=wanted.device.type)
    tensors, sources, total = taken.tensors, list(taken.sources), taken.weight_bytes
    del taken  # the storages must go as they are copied
    plan = _slabs(sources, config.memory.slab_bytes, memory.granularity)
    progress = ProgressReport(claimed.control)
    progress.begin("publish", total)
    storages: list[Storage] = [Storage(0, 0, "")] * len(sources)
    done = base = 0
    with contextlib.ExitStack() as made:
        slabs: list[Slab] = []
        for indices, nbytes in plan:
            slab = memory.create(nbytes)
            made.callback(slab.close)
            slabs.append(slab)
            places = dict(_places(indices, sources))
            found = _fill(memory, slab, [(sources[i], places[i]) for i in indices])
            for index, storage in zip(indices, found, strict=True):
                storages[index] = Storage(base + storage.offset, storage.nbytes, storage.digest)
                done += storage.nbytes
            _move(model, tensors, places, memory, slab)
            for index in indices:
                sources[index] = _GONE
            if wanted.device.type == "cuda":
                torch.cuda.empty_cache()
            base += nbytes
            progress.advance(done)
        manifest = Manifest(
            id=secrets.token_hex(16),
            fingerprint=_held(claimed.order, wanted, type(model).__name__),
            slabs=tuple(slab.info for slab in slabs),
            storages=tuple(storages),
            tensors=tensors,
            extras=dict(extras),
            checkpoint=wanted.identity.shards,
        )
        return publish_slabs(claimed.control, memory, slabs, manifest)


def not_published(error: WcacheError | OSError, rank: RankId) -> WcacheError:
    """What kept weights that an engine has read from being published, for its operator."""
    hint = ""
    if isinstance(error, WcacheError):
        why, hint = error.message, error.hint
    elif isinstance(error, ConnectionError):
        why = f"the daemon of rank {rank} ended meanwhile"
        hint = "the next engine that starts publishes"
    elif isinstance(error, TimeoutError):
        why = f"the daemon of rank {rank} does not answer"
    else:
        why = (error.strerror or str(error)).lower()
    exit_code = error.exit_code if isinstance(error, WcacheError) else None
    return WcacheError(
        f"the weights were read from disk and not published: {why}", hint=hint, exit_code=exit_code
    )


def point_at(model: torch.nn.Module, attachment: Attachment) -> None:
    """Points the parameters of a model that was published at the whole map, for reading."""
    tree = Tree(model)
    for tensor in attachment.manifest.tensors:
        slot = tree.slot(tensor.name)
        if tensor.kind == "parameter" and tensor.tied_to is None and slot is not None:
            parameter = slot.value
            assert parameter is not None  # it was harvested
            parameter.data = attachment.tensors[tensor.name]


# --- slabs ------------------------------------------------------------------------------------

_GONE = Source(torch.empty(0, dtype=torch.uint8).untyped_storage(), 0, 0)


def _slabs(
    sources: Sequence[Source], slab_bytes: int, granularity: int
) -> list[tuple[list[int], int]]:
    """Which sources go into each slab, by index, and its size.

    No storage crosses from one slab into the next, so that each slab can be mapped alone; one that
    is larger than ``slab_bytes`` gets a slab of its own.
    """
    made: list[tuple[list[int], int]] = []
    indices: list[int] = []
    held = 0
    for index, source in enumerate(sources):
        nbytes = _aligned(source.nbytes)
        if indices and held + nbytes > max(slab_bytes, _rounded(held, granularity)):
            made.append((indices, held))
            indices, held = [], 0
        indices.append(index)
        held += nbytes
    made.append((indices, held))
    if len(made) >= MAX_FDS_PER_TRANSFER:
        raise UsageError(f"the model would need {len(made)} slabs", hint="raise memory.slab_bytes")
    return [(group, _rounded(nbytes, granularity)) for group, nbytes in made if group]


def _rounded(nbytes: int, granularity: int) -> int:
    return max(-(-nbytes // granularity), 1) * granularity


def _aligned(nbytes: int) -> int:
    return -(-nbytes // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT


def _places(indices: Sequence[int], sources: Sequence[Source]) -> Iterator[tuple[int, int]]:
    """(index, offset within the slab) of each source."""
    end = 0
    for index in indices:
        yield index, end
        end += _aligned(sources[index].nbytes)


def _fill(memory: Memory, slab: Slab, content: Sequence[tuple[Source, int]]) -> tuple[Storage, ...]:
    """Copies and digests; nothing that could write to the slab is left."""
    mapping = memory.map([slab], Access.WRITE)
    try:
        whole = mapping.tensor()
        for source, offset in content:
            whole[offset : offset + source.nbytes].copy_(source.content())
        return digested(whole, [(at, source.nbytes) for source, at in content], lambda _: None)
    finally:
        mapping.close()


def _move(
    model: torch.nn.Module,
    tensors: Sequence[Tensor],
    places: Mapping[int, int],
    memory: Memory,
    slab: Slab,
) -> None:
    """Points the parameters whose storages are in ``slab`` there, as the same Python objects.

    Buffers and plain attributes stay where they are: an engine writes to them.
    """
    mapping = memory.map([slab], Access.READ)
    try:
        whole, tree = mapping.tensor(), Tree(model)
        for tensor in tensors:
            if tensor.kind != "parameter" or tensor.tied_to or tensor.storage not in places:
                continue
            slot = tree.slot(tensor.name)
            assert slot is not None  # the harvest found it there
            parameter = slot.value
            assert parameter is not None
            typed = whole.view(TORCH_DTYPES[tensor.dtype])
            begin = places[tensor.storage] // typed.element_size() + tensor.storage_offset
            parameter.data = typed.as_strided(tensor.shape, tensor.stride, begin)
    finally:
        mapping.close()


# --- fingerprints -----------------------------------------------------------------------------


def _check_order(order: LoadOrder, wanted: Wanted, model_config: Any) -> None:
    """Raises :class:`MismatchError` when the daemon waits for something else than this engine."""
    configured = order.config.model.path
    if not is_same_model(order.config.model.hub_id or configured, model_config):
        raise MismatchError(
            f"rank {wanted.rank} waits for the model {configured}, this is {model_config.model}",
            hint=f"wcache up --model {shlex.quote(str(model_config.model))} --loader publish … has"
            " it wait for this one",
        )
    memory = order.config.memory
    place = order.config.ranks.coordinates(wanted.rank.rank)
    expected = Fingerprint(
        tp_size=wanted.fingerprint.tp_size, tp_rank=wanted.fingerprint.tp_rank,
        pp_size=wanted.fingerprint.pp_size, pp_rank=wanted.fingerprint.pp_rank,
        device=wanted.fingerprint.device, device_uuid=wanted.fingerprint.device_uuid,
    )  # fmt: skip
    there = msgspec.structs.replace(
        held_from(order.config, wanted.rank.rank),
        device_uuid=memory.devices[place.local_rank] if memory.devices else None,
    )
    if found := compare(there, expected):
        told = "; ".join(map(str, found)).replace("cached", "configured")
        raise MismatchError(
            f"rank {wanted.rank} is not laid out as this engine: {told}",
            hint="wcache up --model … --loader publish with the engine's --tp, --pp and --dp",
        )


def _held(order: LoadOrder, wanted: Wanted, architecture: str) -> Fingerprint:
    """What the daemon's configuration says, and all that this engine wants of its weights."""
    asked = {
        name: value
        for name in Fingerprint.__struct_fields__
        if (value := getattr(wanted.fingerprint, name)) is not None
    }
    base = held_from(order.config, wanted.rank.rank, architecture=architecture)
    return msgspec.structs.replace(base, **asked)
