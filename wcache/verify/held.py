"""A rank's generation for as long as it is looked at: leased, checked, mapped."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wcache import manifest as manifests
from wcache.errors import ManifestError, OutOfMemoryError
from wcache.machine import devices
from wcache.manifest import MAX_MANIFEST_BYTES, Manifest, SlabInfo
from wcache.memory.memfd import read_sealed
from wcache.memory.slab import Access, Slab
from wcache.paths import RankPaths
from wcache.protocol.control import Control
from wcache.protocol.messages import Attach, Attached
from wcache.protocol.wire import close_all
from wcache.units import size

if TYPE_CHECKING:
    import torch

    from wcache.memory.slab import Mapping, Memory

HINT_QUICK = "wcache verify --quick needs no GPU memory"


@dataclass(frozen=True, slots=True)
class Held:
    """A lease on the served generation, and its descriptors."""

    attached: Attached
    manifest_fd: int
    slab_fds: list[int]

    def manifest(self) -> Manifest:
        """Raises :class:`ManifestError` or :class:`wcache.errors.ProtocolError` for one not to be
        believed."""
        data = read_sealed(self.manifest_fd, MAX_MANIFEST_BYTES)
        if manifests.digest(data) != self.attached.manifest_digest:
            raise ManifestError("its digest is not the one that the daemon gave")
        manifest = manifests.decode(data)
        if manifest.slabs != self.attached.slabs:
            raise ManifestError("it names other slabs than the daemon")
        manifests.check(manifest, range_bytes=sum(slab.nbytes for slab in manifest.slabs))
        return manifest


@contextmanager
def held(paths: RankPaths) -> Iterator[Held]:
    """Raises :class:`wcache.errors.NotReadyError` when the rank has no weights, and
    :class:`wcache.errors.NoSuchRankError` when it has no daemon."""
    with Control.connect(paths, "client") as control:
        attached = control.request(Attach(), Attached)
        fds = control.channel.take_fds(1 + len(attached.slabs))
        try:
            yield Held(attached, fds[0], fds[1:])
        finally:
            close_all(fds)


def memory_of(info: SlabInfo) -> "Memory":
    """The memory in which a slab lies."""
    from wcache.memory import open_memory

    if info.kind == "cuda":
        return open_memory("cuda", device_uuid=info.device_uuid)
    return open_memory("cpu")


@contextmanager
def mapped(one: Held) -> "Iterator[torch.Tensor]":
    """The slabs back to back as uint8[n], for reading, where they are.

    Raises :class:`OutOfMemoryError`, with the numbers, when the GPU has no room for the CUDA
    context that this takes. No tensor over the slabs may be left at the end.
    """
    check_context(one.attached.slabs[0])
    slabs = [Slab(fd, info) for fd, info in zip(one.slab_fds, one.attached.slabs, strict=True)]
    mapping: Mapping = memory_of(one.attached.slabs[0]).map(slabs, Access.READ)
    try:
        yield mapping.tensor()
    finally:
        mapping.close()


def check_context(info: SlabInfo) -> None:
    """Raises :class:`OutOfMemoryError` unless this process can have a context on a slab's GPU."""
    if info.kind != "cuda" or info.device_uuid is None:
        return
    from wcache.memory import driver

    ordinal = driver.device_ordinals().get(info.device_uuid)
    if ordinal is not None and driver.has_context(ordinal):
        return
    free = devices.gpu(info.device_uuid).free_bytes
    if free < devices.CONTEXT_BYTES:
        raise OutOfMemoryError(
            f"GPU {info.device_uuid} is too full to be looked into: a CUDA context takes"
            f" {size(devices.CONTEXT_BYTES)}, {size(free)} is free",
            hint=HINT_QUICK,
        )


def gpu_room() -> AbstractContextManager[None]:
    """Raises :class:`OutOfMemoryError` where torch finds no room on the GPU."""
    from wcache.memory import room

    return room.gpu_room(HINT_QUICK)
