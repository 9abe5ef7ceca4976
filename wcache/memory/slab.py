"""What every kind of memory offers: slabs that are descriptors, mapped back to back."""

import os
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from wcache.manifest import SlabInfo

if TYPE_CHECKING:
    import torch


class Access(Enum):
    """What a mapping may be used for."""

    WRITE = "write"
    """Shared and writable: the loader's, before the slab is sealed."""
    READ = "read"
    """A store faults in the process that did it."""
    PRIVATE = "private"
    """Host only: a store costs this process a page of its own and nobody else sees it."""


class Slab:
    """One allocation of fixed size that lives as long as anybody holds a descriptor of it."""

    def __init__(self, fd: int, info: SlabInfo) -> None:
        """Takes ownership of ``fd``."""
        self.fd = fd
        self.info = info

    @property
    def nbytes(self) -> int:
        return self.info.nbytes

    def close(self) -> None:
        """Gives up this process's descriptor; mappings made from it stay."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Mapping(Protocol):
    """Slabs back to back in one range of addresses.

    The range is unmapped when it was closed *and* no tensor over it is left, so a view can never
    reach memory that is gone.
    """

    address: int
    nbytes: int

    def tensor(self) -> "torch.Tensor":
        """The whole range as ``uint8[nbytes]`` on the memory's device, without a copy."""

    def close(self) -> None:
        """Gives the range up; safe to call twice."""


class Memory(Protocol):
    """Where slabs are made and mapped: the host's memory, or one GPU's."""

    granularity: int
    """Slab sizes are multiples of this many bytes."""
    device: str
    """The torch device of mapped tensors: ``cpu`` or ``cuda:N``."""
    device_uuid: str | None
    """``GPU-…`` as the driver names it; None for the host."""

    def free_bytes(self) -> int:
        """What could be allocated now."""

    def create(self, nbytes: int) -> Slab:
        """Allocates a slab; raises :class:`wcache.errors.OutOfMemoryError`."""

    def seal(self, slab: Slab) -> None:
        """Makes a slab unchangeable for whoever gets its descriptor.

        Every writable mapping of a host slab must be closed before; raises
        :class:`wcache.errors.WcacheError` otherwise.
        """

    def map(self, slabs: Sequence[Slab], access: Access) -> Mapping:
        """Maps ``slabs`` back to back in their order."""


def slab_sizes(total_bytes: int, slab_bytes: int, granularity: int) -> list[int]:
    """Sizes of the slabs for ``total_bytes``: full ones, and the last cut to ``granularity``."""
    sizes = [slab_bytes] * (total_bytes // slab_bytes)
    if rest := total_bytes % slab_bytes:
        sizes.append(-(-rest // granularity) * granularity)
    return sizes
