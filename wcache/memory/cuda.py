"""Slabs in one GPU's memory: cuMemCreate allocations held by descriptors, mapped back to back."""

import logging
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wcache.errors import OutOfMemoryError, WcacheError
from wcache.machine import devices
from wcache.manifest import SlabInfo
from wcache.memory import driver
from wcache.memory.descriptor import SLAB_GRANULARITY
from wcache.memory.slab import Access, Slab

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class _Range:
    """A mapped range, as torch takes memory that is not its own; unmapped with its last user."""

    def __init__(self, address: int, nbytes: int) -> None:
        # False: torch refuses memory that says that it is read-only. The GPU enforces it anyway.
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaMapping:
    """GPU slabs back to back; see :class:`wcache.memory.slab.Mapping`."""

    def __init__(self, address: int, sizes: Sequence[int], ordinal: int) -> None:
        """Takes ownership of the range, in which allocations of ``sizes`` are mapped."""
        self.address = address
        self.nbytes = sum(sizes)
        self.device = f"cuda:{ordinal}"
        # torch keeps the range object for as long as a tensor uses the memory; the finalizer runs
        # when close() has dropped it here as well. Not at exit: the context may be gone by then,
        # and the process's end unmaps everything anyway.
        self._range: _Range | None = _Range(address, self.nbytes)
        weakref.finalize(self._range, _retire, address, tuple(sizes), ordinal).atexit = False

    def tensor(self) -> "torch.Tensor":
        """The whole range as ``uint8[nbytes]`` on :attr:`device`, without a copy.

        A store into a mapping for reading is an illegal access, after which this process's CUDA
        context is of no more use; the bytes are not changed.
        """
        import torch

        if self._range is None:
            raise ValueError("the mapping is closed")
        tensor = torch.as_tensor(self._range, device=self.device)
        if tensor.data_ptr() != self.address:
            raise WcacheError(f"torch copied memory of {self.device} instead of taking it as it is")
        return tensor

    def close(self) -> None:
        """Gives the range up; it is unmapped when no tensor over it is left."""
        self._range = None


class CudaMemory:
    """One GPU's memory; see :class:`wcache.memory.slab.Memory`.

    Creating needs no CUDA context; mapping makes the primary one, as torch does.
    """

    def __init__(self, device_uuid: str) -> None:
        """Raises :class:`WcacheError` unless the GPU is visible to this process."""
        ordinals = driver.device_ordinals()
        if device_uuid not in ordinals:
            raise _not_visible(device_uuid, ordinals)
        self._ordinal = ordinals[device_uuid]
        self.device_uuid: str | None = device_uuid
        self.device = f"cuda:{self._ordinal}"
        # Both are powers of two.
        self.granularity = max(SLAB_GRANULARITY, driver.allocation_granularity(self._ordinal))
        self._uuid = device_uuid

    def free_bytes(self) -> int:
        """From NVML: the driver itself would want a context of 600 MiB to answer this."""
        return devices.gpu(self._uuid).free_bytes

    def create(self, nbytes: int) -> Slab:
        """Allocates a slab, whose content is undefined until it is written.

        The descriptor is all that keeps it: this process gives its own handle up at once.
        """
        if nbytes <= 0 or nbytes % self.granularity:
            raise WcacheError(
                f"slab of {nbytes} bytes, must be a positive multiple of {self.granularity}"
            )
        try:
            handle = driver.create(self._ordinal, nbytes)
        except OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"slab of {nbytes} bytes does not fit in the memory of GPU {self._uuid},"
                f" {self.free_bytes()} bytes are free",
                hint=error.hint,
            ) from None
        try:
            fd = driver.export(handle)
        finally:
            driver.release(handle)
        return Slab(fd, SlabInfo(kind="cuda", nbytes=nbytes, device_uuid=self._uuid))

    def seal(self, slab: Slab) -> None:
        """Does nothing: the driver has no seals.

        What protects a GPU slab is that readers map it for reading; whoever has the descriptor
        could map it for writing, so the daemon hands it to trusted users only.
        """

    def map(self, slabs: Sequence[Slab], access: Access) -> CudaMapping:
        """Maps ``slabs`` back to back in their order; raises :class:`WcacheError`."""
        if access is Access.PRIVATE:
            raise WcacheError("a GPU has no private pages: map for reading, and copy what changes")
        for slab in slabs:
            self._check(slab)
        sizes = [slab.nbytes for slab in slabs]
        if not sizes:
            raise WcacheError("there are no slabs to map")
        with driver.primary_context(self._ordinal):
            address = driver.reserve(sum(sizes))
            mapped: list[int] = []
            try:
                for slab in slabs:
                    _map_slab(address + sum(mapped), slab)
                    mapped.append(slab.nbytes)
                writable = access is Access.WRITE
                driver.set_access(address, sum(sizes), self._ordinal, writable=writable)
            except BaseException:
                _unmap(address, mapped, sum(sizes))
                raise
        return CudaMapping(address, sizes, self._ordinal)

    def _check(self, slab: Slab) -> None:
        if slab.info.kind != "cuda":
            raise WcacheError(f"a {slab.info.kind} slab can not be mapped as GPU memory")
        if slab.info.device_uuid != self._uuid:
            raise WcacheError(f"slab lies on GPU {slab.info.device_uuid}, not on {self._uuid}")
        if slab.nbytes <= 0 or slab.nbytes % self.granularity:
            raise WcacheError(f"slab of {slab.nbytes} bytes can not be mapped")


def _map_slab(address: int, slab: Slab) -> None:
    """Maps one slab; the map keeps the memory, so the imported handle is given up again."""
    handle = driver.import_(slab.fd)
    try:
        driver.map_handle(address, slab.nbytes, handle)
    finally:
        driver.release(handle)


def _retire(address: int, sizes: Sequence[int], ordinal: int) -> None:
    """Unmaps a range that nothing in Python refers to any more.

    Kernels that read it may still be queued: a tensor's death does not wait for them. Where the
    context is broken by an earlier fault nothing can be unmapped, and the process's end does it.
    """
    try:
        with driver.primary_context(ordinal):
            driver.synchronize()
            _unmap(address, sizes, sum(sizes))
    except WcacheError as error:
        log.warning("%d bytes of cuda:%d stay mapped: %s", sum(sizes), ordinal, error.message)


def _unmap(address: int, sizes: Sequence[int], reserved_bytes: int) -> None:
    """Unmaps allocations of ``sizes`` from ``address`` on, and gives the addresses back."""
    place = address
    for nbytes in sizes:
        driver.unmap(place, nbytes)
        place += nbytes
    driver.free_addresses(address, reserved_bytes)


def _not_visible(device_uuid: str, ordinals: dict[str, int]) -> WcacheError:
    names = ", ".join(ordinals) or "none"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limit = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    return WcacheError(
        f"GPU {device_uuid} is not visible to this process",
        hint=f"visible GPUs: {names}{limit}",
    )
