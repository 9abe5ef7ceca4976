"""The check of content: every storage's digest computed anew, where the bytes are."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from wcache.manifest import Manifest
from wcache.units import size
from wcache.verify.held import gpu_room
from wcache.verify.result import MAX_NAMES, Outcome, Progress, Result, some

if TYPE_CHECKING:
    import torch

# Digests are computed for so many bytes at a time, so that progress can be shown in between.
_BATCH_BYTES = 2 << 30


def damaged(manifest: Manifest, content: "torch.Tensor", progress: Progress) -> list[int]:
    """Indices of the storages whose bytes in ``content``, uint8[n], have not their digest.

    Raises :class:`wcache.errors.OutOfMemoryError` when a GPU has no room for what this takes.
    """
    from wcache.memory.digest import digests

    bad: list[int] = []
    done, total = 0, manifest.weight_bytes
    progress("digest", done, total)
    for batch in _batches(manifest):
        storages = [manifest.storages[index] for index in batch]
        with gpu_room():
            computed = digests(content, [(one.offset, one.nbytes) for one in storages])
        bad += [
            index
            for index, one, digest in zip(batch, storages, computed, strict=True)
            if one.digest != digest
        ]
        done += sum(one.nbytes for one in storages)
        progress("digest", done, total)
    return bad


def digests_result(
    rank: int, manifest: Manifest, bad: list[int], *, outcome: Outcome = "bad"
) -> Result:
    """What :func:`damaged` found; ``outcome`` is that of damage."""
    from wcache.memory.digest import ALGORITHM

    if not bad:
        total = size(manifest.weight_bytes)
        detail = f"{len(manifest.storages)} storages with {total} have their {ALGORITHM}"
        return Result(rank=rank, check="digests", result="ok", detail=detail)
    parts = [f"storage {index} ({some(names(manifest, index))})" for index in bad[:MAX_NAMES]]
    more = f" and {len(bad) - MAX_NAMES} more" if len(bad) > MAX_NAMES else ""
    detail = "bytes are not those that were published: " + ", ".join(parts) + more
    return Result(rank=rank, check="digests", result=outcome, detail=detail)


def names(manifest: Manifest, storage: int) -> list[str]:
    """The tensors that view a storage."""
    return [tensor.name for tensor in manifest.tensors if tensor.storage == storage]


def _batches(manifest: Manifest) -> Iterator[list[int]]:
    """Indices of storages, about :data:`_BATCH_BYTES` at a time."""
    batch: list[int] = []
    nbytes = 0
    for index, storage in enumerate(manifest.storages):
        batch.append(index)
        nbytes += storage.nbytes
        if nbytes >= _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
