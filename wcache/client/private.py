"""Private, writable copies of mapped tensors that keep their strides and what they share."""

from collections import defaultdict
from collections.abc import Collection, Mapping

import torch

from wcache.manifest import DTYPE_BYTES, STORAGE_ALIGNMENT, Manifest, Tensor


def private_copies(
    manifest: Manifest, tensors: Mapping[str, torch.Tensor], names: Collection[str]
) -> dict[str, torch.Tensor]:
    """A copy for each of ``names``: tied ones are one object, overlapping ones still overlap.

    Of a storage only the bytes from the first to the last that they reach are copied, so that a
    small attribute which views a large parameter stays small.
    """
    described = {tensor.name: tensor for tensor in manifest.tensors}
    roots = {name: described[name].tied_to or name for name in names}
    by_storage: dict[int, list[Tensor]] = defaultdict(list)
    for root in dict.fromkeys(roots.values()):
        by_storage[described[root].storage].append(described[root])
    copies: dict[str, torch.Tensor] = {}
    for group in by_storage.values():
        copies.update(_copied(group, tensors))
    return {name: copies[root] for name, root in roots.items()}


def _copied(group: list[Tensor], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of tensors of one storage, in a storage of their own."""
    reached = [_extent(tensor) for tensor in group if 0 not in tensor.shape]
    # Aligned as the storage is, so that every dtype's view of the copy begins at whole elements.
    first = min((start for start, _ in reached), default=0)
    first -= first % STORAGE_ALIGNMENT
    last = max((stop for _, stop in reached), default=first)
    rounded = -(-(last - first) // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT
    sample = tensors[group[0].name]
    copy = torch.empty(rounded, dtype=torch.uint8, device=sample.device)
    storage_start = (sample.storage_offset() - group[0].storage_offset) * sample.element_size()
    mapped = torch.empty(0, dtype=torch.uint8, device=sample.device).set_(
        sample.untyped_storage(), storage_start + first, (last - first,), (1,)
    )
    copy[: last - first].copy_(mapped)
    made = {}
    for tensor in group:
        is_empty = 0 in tensor.shape
        begin = 0 if is_empty else tensor.storage_offset - first // DTYPE_BYTES[tensor.dtype]
        typed = copy.view(tensors[tensor.name].dtype)
        made[tensor.name] = typed.as_strided(tensor.shape, tensor.stride, begin)
    return made


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage between which a tensor that is not empty lies."""
    item = DTYPE_BYTES[tensor.dtype]
    steps = zip(tensor.shape, tensor.stride, strict=True)
    last = tensor.storage_offset + sum((size - 1) * step for size, step in steps)
    return tensor.storage_offset * item, (last + 1) * item
