"""Slabs for a rank's weights: made, digested, sealed and handed to its daemon."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from wcache import manifest as manifests
from wcache.config import Config
from wcache.errors import OutOfMemoryError, UsageError
from wcache.load.report import Conversation
from wcache.manifest import Manifest, Storage
from wcache.memory import open_memory
from wcache.memory.memfd import create_sealed
from wcache.memory.slab import Memory, Slab, slab_sizes
from wcache.protocol.messages import MAX_FDS_PER_TRANSFER, Publish, Published
from wcache.units import size

if TYPE_CHECKING:
    import torch

_DIGEST_BATCH_BYTES = 256 << 20
_MAX_ALLOCATING = 16


def rank_memory(config: Config, rank: int) -> Memory:
    """The memory that ``config`` gives to ``rank``."""
    place = config.ranks.coordinates(rank)
    devices = config.memory.devices
    return open_memory(
        config.memory.device,
        device_uuid=devices[place.local_rank] if devices else None,
        hugepages=config.memory.hugepages,
    )


def check_slabs(rank: int, count: int) -> None:
    """Raises :class:`UsageError` for more slabs than can be handed over."""
    # The manifest's descriptor travels with those of the slabs.
    if count >= MAX_FDS_PER_TRANSFER:
        raise UsageError(
            f"rank {rank} would need {count} slabs, at most {MAX_FDS_PER_TRANSFER - 1} are"
            " handed over",
            hint="raise memory.slab_bytes (--slab-bytes)",
        )


def check_memory(config: Config, memory: Memory, rank: int, total_bytes: int) -> list[int]:
    """Sizes of the slabs for ``total_bytes``.

    Raises :class:`OutOfMemoryError`, with what is needed and what is free, before any is made, and
    what :func:`check_slabs` raises.
    """
    sizes = slab_sizes(total_bytes, config.memory.slab_bytes, memory.granularity)
    check_slabs(rank, len(sizes))
    needed, free = sum(sizes), memory.free_bytes()
    if needed > free:
        where = memory.device_uuid or "the host"
        raise OutOfMemoryError(
            f"rank {rank} needs {size(needed)} of memory ({needed} bytes),"
            f" {where} has {size(free)} free ({free} bytes)",
            hint="free memory, or spread the model over more ranks (--tp)",
        )
    return sizes


def device_facts(memory: Memory) -> dict[str, str]:
    """What of the device and of torch belongs into a fingerprint."""
    import torch

    facts = {"torch_version": str(torch.__version__)}
    if memory.device_uuid is not None:
        major, minor = torch.cuda.get_device_capability(memory.device)
        facts["device_capability"] = f"{major}.{minor}"
    return facts


@contextlib.contextmanager
def made_slabs(
    memory: Memory, sizes: Sequence[int], progress: Callable[[int], None]
) -> Iterator[list[Slab]]:
    """Slabs of ``sizes``; this process's descriptors of them are closed at the end.

    On the host an allocation takes its pages one by one, with a lock on its slab: 4.2 GB/s in one
    thread, and 7.9 in two that make a slab each (measured on 2 cores).
    """
    slabs: list[Slab] = []
    workers = max(1, min(len(sizes), len(os.sched_getaffinity(0)), _MAX_ALLOCATING))
    with ThreadPoolExecutor(workers, thread_name_prefix="wcache-allocate") as pool:
        made = [pool.submit(memory.create, nbytes) for nbytes in sizes]
        try:
            for future in made:
                slabs.append(future.result())
                progress(sum(slab.nbytes for slab in slabs))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            for future in made:
                if not future.cancelled() and future.exception() is None:
                    future.result().close()
            raise
    try:
        yield slabs
    finally:
        for slab in slabs:
            slab.close()


def digested(
    content: "torch.Tensor", spans: Iterable[tuple[int, int]], progress: Callable[[int], None]
) -> tuple[Storage, ...]:
    """A :class:`Storage` with its digest for each (offset, nbytes) of ``content``, uint8[n]."""
    from wcache.memory.digest import digests

    storages: list[Storage] = []
    done = 0
    for batch in _batches(spans):
        found = digests(content, batch)
        storages += [Storage(*span, digest) for span, digest in zip(batch, found, strict=True)]
        done += sum(nbytes for _, nbytes in batch)
        progress(done)
    return tuple(storages)


def _batches(spans: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Cuts ``spans`` into lists of a few hundred MiB, so that progress can be told in between."""
    batch: list[tuple[int, int]] = []
    held = 0
    for span in spans:
        batch.append(span)
        held += span[1]
        if held >= _DIGEST_BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def publish_slabs(
    control: Conversation, memory: Memory, slabs: Sequence[Slab], manifest: Manifest
) -> int:
    """Seals ``slabs`` and hands them over with ``manifest``; returns the generation's number.

    Every writable mapping of the slabs must be closed. Raises
    :class:`wcache.errors.ManifestError` for a manifest that the daemon could not take either.
    """
    manifests.check(manifest, range_bytes=sum(slab.nbytes for slab in slabs))
    for slab in slabs:
        memory.seal(slab)
    return hand_over(control, slabs, manifest)


def hand_over(control: Conversation, slabs: Sequence[Slab], manifest: Manifest) -> int:
    """:func:`publish_slabs` for slabs that are sealed already."""
    fd = create_sealed("wcache-manifest", manifests.encode(manifest))
    try:
        fds = [fd, *(slab.fd for slab in slabs)]
        message = Publish(slabs=tuple(slab.info for slab in slabs))
        return control.request(message, Published, fds).generation
    finally:
        os.close(fd)
