"""A rank's weights read from disk once more, some storages at a time."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from wcache import fp8
from wcache.checkpoint import Checkpoint, open_checkpoint
from wcache.config import Config
from wcache.load.job import row_major
from wcache.load.placement import plan
from wcache.load.plan import Plan, Target, align
from wcache.manifest import STORAGE_ALIGNMENT, Manifest, Tensor
from wcache.memory import open_memory
from wcache.memory.slab import Access

if TYPE_CHECKING:
    import torch

# Beside a model that fills the memory there is room for little; a larger tensor is read alone.
_BATCH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Fresh:
    """What the loader would make of the checkpoint now."""

    checkpoint: Checkpoint
    plan: Plan

    @classmethod
    def of(cls, folder: Path, config: Config, rank: int) -> "Fresh":
        """Reads headers only; raises :class:`wcache.errors.CheckpointError`."""
        checkpoint = open_checkpoint(folder)
        return cls(checkpoint, plan(checkpoint, config, rank))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, as its manifest would describe it; storages count from 0."""
        found: dict[str, Tensor] = {}
        storage = 0
        for target in self.plan.targets:
            shape = target.shape
            tied = found.get(target.tied_to) if target.tied_to is not None else None
            found[target.name] = Tensor(
                name=target.name, storage=storage if tied is None else tied.storage,
                dtype=target.dtype, shape=shape, stride=row_major(shape), tied_to=target.tied_to,
            )  # fmt: skip
            if tied is not None:
                continue
            storage += 1
            if target.scale is not None:
                scale = target.scale
                found[scale.name] = Tensor(
                    name=scale.name, storage=storage, dtype=fp8.SCALE_DTYPE, shape=scale.shape,
                    stride=row_major(scale.shape),
                )  # fmt: skip
                storage += 1
        return found

    def read(
        self, wanted: Collection[str], progress: Callable[[int], None]
    ) -> "Iterator[tuple[str, torch.Tensor]]":
        """The bytes of the storages of the tensors ``wanted``, uint8[n] on the host, by name.

        A storage is valid until the next one is asked for. ``progress`` is called with the bytes
        read so far. Scratch memory of 256 MiB is used, or of the largest tensor where that is more.

        Raises :class:`wcache.errors.OutOfMemoryError` when the host has no room for it, and
        :class:`wcache.errors.CheckpointError` when the files are not what they were.
        """
        from wcache.load.read import read_plan

        batches = list(_batches(_wanted(self.plan, wanted)))
        if not batches:
            return
        memory = open_memory("cpu")
        largest = max(batch.total_bytes for batch in batches)
        slab = memory.create(-(-largest // memory.granularity) * memory.granularity)
        mapping = memory.map([slab], Access.WRITE)
        slab.close()
        done = 0
        try:
            content = mapping.tensor()
            for batch in batches:

                def advance(read: int, done: int = done) -> None:
                    progress(done + read)

                read_plan(self.checkpoint, batch, mapping, advance, digested=False)
                done += batch.weight_bytes
                for name, offset, length in _storages(batch):
                    if name in wanted:
                        yield name, content[offset : offset + length]
        finally:
            mapping.close()


def comes_from_disk(manifest: Manifest) -> bool:
    """True when wcache's own loader read these weights, so that it can read them again."""
    return manifest.fingerprint.loader == "safetensors" and bool(manifest.checkpoint)


def _storages(batch: Plan) -> Iterator[tuple[str, int, int]]:
    """Name, offset and length of every storage of a plan."""
    for target in batch.stored:
        yield target.name, target.offset, target.nbytes
        if target.scale is not None:
            yield target.scale.name, target.scale.offset, target.scale.nbytes


def _wanted(whole: Plan, names: Collection[str]) -> Iterator[Target]:
    """Stored targets of which the weight or its scale is wanted: the two are made together."""
    for target in whole.stored:
        if target.name in names or (target.scale is not None and target.scale.name in names):
            yield target


def _batches(targets: Iterator[Target]) -> Iterator[Plan]:
    """Plans of their own, each laid out from 0 on."""
    batch: list[Target] = []
    end = 0
    for target in targets:
        scale_bytes = align(target.scale.nbytes) if target.scale is not None else 0
        if batch and end + align(target.nbytes) + scale_bytes > _BATCH_BYTES:
            yield Plan(tuple(batch), max(end, STORAGE_ALIGNMENT))
            batch, end = [], 0
        placed = replace(target, offset=end)
        end += align(target.nbytes)
        if target.scale is not None:
            placed = replace(placed, scale=replace(target.scale, offset=end))
            end += scale_bytes
        batch.append(placed)
    if batch:
        yield Plan(tuple(batch), max(end, STORAGE_ALIGNMENT))
