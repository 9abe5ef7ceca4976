"""What lies where in a rank's slabs, and the checks that a manifest must pass. Pure."""

import hashlib
import re
from itertools import pairwise
from typing import Any, Literal

import msgspec

from wcache.errors import ManifestError
from wcache.fingerprint import Fingerprint

MANIFEST_VERSION = 1
MAX_MANIFEST_BYTES = 256 << 20
MAX_DIMENSIONS = 64
MAX_NAME_LENGTH = 1024
# Tensor cores and vectorised copies want 256; a cache line of a GPU's L2 sector pair is 128.
STORAGE_ALIGNMENT = 256

# Bytes of one element, by the name that safetensors gives a dtype. The names behind the comment
# are in the safetensors format (0.7) but have no torch dtype of whole bytes.
DTYPE_BYTES: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8, "C64": 8,
}  # fmt: skip

_DIGEST = re.compile(r"[a-z0-9]{1,16}:[0-9a-f]{1,128}")

SlabKind = Literal["host", "cuda"]
TensorKind = Literal["parameter", "buffer", "attribute"]


class Storage(msgspec.Struct, frozen=True):
    """A run of bytes that one or more tensors view."""

    offset: int
    """Byte offset in the rank's slabs laid back to back, so a storage may cross from one slab
    into the next: every mapping puts them back to back."""
    nbytes: int
    digest: str
    """Name of the algorithm and hexadecimal digits (:mod:`wcache.memory.digest`)."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A view of a storage, under the dotted name by which a module knows it."""

    name: str
    storage: int
    """Index in :attr:`Manifest.storages`."""
    dtype: str
    """As safetensors names it; a key of :data:`DTYPE_BYTES`."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    storage_offset: int = 0
    """In elements."""
    kind: TensorKind = "parameter"
    persistent: bool = True
    """False for a buffer that a module's state dict leaves out."""
    tied_to: str | None = None
    """The name of the tensor that is the same Python object."""


class ShardIdentity(msgspec.Struct, frozen=True):
    """What tells one checkpoint file from another without reading all of it."""

    name: str
    nbytes: int
    header: str
    """Digest of its safetensors header."""
    sample: str
    """Digest of a block of every tensor in it."""


class SlabInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A slab, as said of its descriptor."""

    kind: SlabKind
    nbytes: int
    device_uuid: str | None = None
    """``GPU-…``; None for the host's memory."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a client needs beside the slabs themselves."""

    version: int = MANIFEST_VERSION
    id: str
    """Random, 32 hexadecimal digits: two loads of the same model are two generations."""
    fingerprint: Fingerprint
    slabs: tuple[SlabInfo, ...]
    """In the order in which they are mapped back to back."""
    storages: tuple[Storage, ...]
    tensors: tuple[Tensor, ...]
    extras: dict[str, Any] = {}
    """JSON-able Python state that post-processing left on modules, by dotted name."""
    checkpoint: tuple[ShardIdentity, ...] = ()
    """The files that were loaded; empty for what an engine published."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights, without the gaps between storages."""
        return sum(storage.nbytes for storage in self.storages)


def encode(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest)


def decode(data: bytes) -> Manifest:
    """Raises :class:`ManifestError`; checks types only, :func:`check` does the rest."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"manifest is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version != MANIFEST_VERSION:
            raise ManifestError(
                f"manifest has version {version}, this wcache reads {MANIFEST_VERSION}",
                hint="run the same wcache in daemon, loader and engine",
            )
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"manifest can not be read: {error}") from None


class _Versioned(msgspec.Struct):
    version: int


def digest(data: bytes) -> str:
    """``sha256:`` and 64 hexadecimal digits over an encoded manifest."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def check(manifest: Manifest, *, range_bytes: int) -> None:
    """Raises :class:`ManifestError` unless all of it lies within ``range_bytes`` of slabs."""
    if not re.fullmatch(r"[0-9a-f]{32}", manifest.id):
        raise ManifestError("manifest has no id of 32 hexadecimal digits")
    if len({(slab.kind, slab.device_uuid) for slab in manifest.slabs}) != 1:
        raise ManifestError("slabs are not all of one kind and on one device")
    _check_storages(manifest.storages, range_bytes)
    seen: dict[str, Tensor] = {}
    for tensor in manifest.tensors:
        if not 0 < len(tensor.name) <= MAX_NAME_LENGTH:
            raise ManifestError(f"tensor name of {len(tensor.name)} characters")
        if tensor.name in seen:
            raise ManifestError(f"tensor {tensor.name!r} is there twice")
        _check_tensor(tensor, manifest.storages)
        seen[tensor.name] = tensor
    for tensor in manifest.tensors:
        if tensor.tied_to is None:
            continue
        partner = seen.get(tensor.tied_to)
        if partner is None or partner.tied_to is not None or partner.storage != tensor.storage:
            raise ManifestError(f"tensor {tensor.name!r} is tied to {tensor.tied_to!r}, which is no"
                                " tensor of the same storage")  # fmt: skip


def _check_storages(storages: tuple[Storage, ...], range_bytes: int) -> None:
    for index, storage in enumerate(storages):
        if storage.nbytes < 0 or storage.offset < 0:
            raise ManifestError(f"storage {index} has a negative size or offset")
        if storage.offset % STORAGE_ALIGNMENT:
            raise ManifestError(
                f"storage {index} begins at byte {storage.offset},"
                f" which is no multiple of {STORAGE_ALIGNMENT}"
            )
        if storage.offset + storage.nbytes > range_bytes:
            raise ManifestError(
                f"storage {index} ends at byte {storage.offset + storage.nbytes}"
                f" of slabs with {range_bytes}"
            )
        if not _DIGEST.fullmatch(storage.digest):
            raise ManifestError(f"storage {index} has no digest")
    order = sorted(
        (storage.offset, storage.nbytes, index)
        for index, storage in enumerate(storages)
        if storage.nbytes
    )
    for (offset, nbytes, first), (following, _, second) in pairwise(order):
        if offset + nbytes > following:
            raise ManifestError(f"storages {first} and {second} overlap")


def _check_tensor(tensor: Tensor, storages: tuple[Storage, ...]) -> None:
    name, shape, stride = tensor.name, tensor.shape, tensor.stride
    if not 0 <= tensor.storage < len(storages):
        raise ManifestError(f"tensor {name!r} is in storage {tensor.storage}, which is not there")
    item = DTYPE_BYTES.get(tensor.dtype)
    if item is None:
        raise ManifestError(f"tensor {name!r} has the unknown dtype {tensor.dtype[:32]!r}")
    if len(shape) > MAX_DIMENSIONS or len(shape) != len(stride):
        raise ManifestError(f"tensor {name!r} has {len(shape)} sizes and {len(stride)} strides")
    if min((tensor.storage_offset, *shape, *stride), default=0) < 0:
        raise ManifestError(f"tensor {name!r} has a negative size, stride or offset")
    # Python's integers do not wrap, so no product of sizes can slip under the bound.
    last = tensor.storage_offset + sum(
        (size - 1) * step for size, step in zip(shape, stride, strict=True)
    )
    nbytes = storages[tensor.storage].nbytes
    if 0 not in shape and (last + 1) * item > nbytes:
        raise ManifestError(f"tensor {name!r} reaches past the {nbytes} bytes of its storage")
