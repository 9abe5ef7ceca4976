"""What a rank's memory will hold: each tensor, the part of the checkpoint it is, and its place."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from wcache import fp8
from wcache.checkpoint import TensorEntry
from wcache.manifest import DTYPE_BYTES, STORAGE_ALIGNMENT


@dataclass(frozen=True, slots=True)
class Slice:
    """``start:stop`` of dimension ``dim``."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Scale:
    """Where the scales of a weight go that is quantized block by block while it is read."""

    name: str
    shape: tuple[int, int]
    """One float32 for each block of 128x128, the last of a row or column may be cut."""
    offset: int
    """Byte offset in the rank's slabs laid back to back."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One tensor of the rank, row-major."""

    name: str
    dtype: str
    """As it will be kept; differs from the source's when it is converted."""
    shape: tuple[int, ...]
    source: TensorEntry
    slice: Slice | None
    """None for the whole tensor."""
    offset: int
    """Byte offset in the rank's slabs laid back to back."""
    nbytes: int
    tied_to: str | None = None
    """The name of the target whose storage this one shares."""
    scale: Scale | None = None
    """Set where the weight is quantized to F8_E4M3 on its way."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Targets in the order in which their bytes are read."""

    targets: tuple[Target, ...]
    total_bytes: int
    """What the slabs must have room for."""

    @property
    def stored(self) -> Iterator[Target]:
        """Targets with a storage of their own."""
        return (target for target in self.targets if target.tied_to is None)

    @property
    def spans(self) -> Iterator[tuple[int, int]]:
        """(offset, nbytes) of every storage: the stored targets in their order, each followed by
        its scale where it has one."""
        for target in self.stored:
            yield target.offset, target.nbytes
            if target.scale is not None:
                yield target.scale.offset, target.scale.nbytes

    @property
    def weight_bytes(self) -> int:
        """Bytes that will be written: without ties and without the gaps between storages."""
        return sum(nbytes for _, nbytes in self.spans)


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that was chosen for a rank and has no place yet."""

    name: str
    source: TensorEntry
    dtype: str
    slice: Slice | None = None
    tied_to: str | None = None
    is_quantized: bool = False
    """Becomes F8_E4M3, with a scale of its own, on its way; ``dtype`` does not count then."""


def lay_out(parts: list[Part]) -> Plan:
    """Gives every part its place; a tied part comes after the one that it is tied to. Pure."""
    targets: dict[str, Target] = {}
    end = 0
    for part in parts:
        shape = sliced_shape(part.source.shape, part.slice)
        dtype = fp8.WEIGHT_DTYPE if part.is_quantized else part.dtype
        nbytes = prod(shape) * DTYPE_BYTES[dtype]
        scale = None
        if part.tied_to is None:
            offset = align(end)
            end = offset + nbytes
            if part.is_quantized:
                scale = _scale(part.name, shape, align(end))
                end = scale.offset + scale.nbytes
        else:
            offset = targets[part.tied_to].offset
        targets[part.name] = Target(
            name=part.name, dtype=dtype, shape=shape, source=part.source, slice=part.slice,
            offset=offset, nbytes=nbytes, tied_to=part.tied_to, scale=scale,
        )  # fmt: skip
    # Room for one unit at least: a model of empty tensors still needs a slab to be mapped.
    return Plan(tuple(targets.values()), max(align(end), STORAGE_ALIGNMENT))


def _scale(weight: str, shape: tuple[int, ...], offset: int) -> Scale:
    rows, columns = fp8.grid(shape)
    nbytes = rows * columns * DTYPE_BYTES[fp8.SCALE_DTYPE]
    return Scale(fp8.scale_name(weight), (rows, columns), offset, nbytes)


def align(offset: int) -> int:
    """The next place at which a storage may begin."""
    return -(-offset // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT


def sliced_shape(shape: tuple[int, ...], part: Slice | None) -> tuple[int, ...]:
    if part is None:
        return shape
    return (*shape[: part.dim], part.stop - part.start, *shape[part.dim + 1 :])
