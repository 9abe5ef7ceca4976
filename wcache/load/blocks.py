"""Where block-wise FP8 weights may be cut: between blocks, and their scales with them. Pure."""

from collections.abc import Collection, Mapping
from typing import Protocol

from wcache import fp8
from wcache.checkpoint import TensorEntry
from wcache.errors import CheckpointError
from wcache.load.plan import Slice


class Rule(Protocol):
    """How tensors are sharded, :class:`wcache.load.placement.Shards` for one."""

    @property
    def tp(self) -> int: ...

    def slice(self, name: str, shape: tuple[int, ...]) -> Slice | None:
        """The part of a tensor for this rank; None for all of it."""


def cut(
    rule: Rule | None,
    name: str,
    tensors: Mapping[str, TensorEntry],
    quantized: Collection[str] = (),
) -> Slice | None:
    """The part of tensor ``name`` that ``rule`` gives to a rank; None for all of it.

    The scales of an FP8 weight are cut where the weight is. Raises :class:`CheckpointError` when an
    edge would be inside a block, of an FP8 weight or of one in ``quantized`` that becomes one: its
    scale would not be that of the whole block any more.
    """
    if rule is None:
        return None
    weight = fp8.weight_name(name)
    if weight is not None and weight in tensors:
        part = rule.slice(weight, tensors[weight].shape)
        return None if part is None else _in_blocks(part)
    entry = tensors[name]
    part = rule.slice(name, entry.shape)
    if part is not None and (entry.dtype == fp8.WEIGHT_DTYPE or name in quantized):
        _check_edges(rule.tp, name, part, entry.shape[part.dim])
    return part


def _in_blocks(part: Slice) -> Slice:
    return Slice(part.dim, part.start // fp8.BLOCK, -(-part.stop // fp8.BLOCK))


def _check_edges(tp: int, name: str, part: Slice, length: int) -> None:
    if not any(edge % fp8.BLOCK and edge != length for edge in (part.start, part.stop)):
        return
    possible = [n for n in range(1, tp) if length % n == 0 and length // n % fp8.BLOCK == 0]
    raise CheckpointError(
        f"tp {tp} would cut a block of {name!r}: dimension {part.dim} has {length}, its shards have"
        f" {part.stop - part.start}, which is no multiple of {fp8.BLOCK}",
        hint=f"tp can be {', '.join(map(str, possible)) or 1}",
    )
