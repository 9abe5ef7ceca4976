"""Memory that outlives its maker: slabs held by descriptors, on the host or on a GPU.

The modules that the daemon uses (:mod:`~wcache.memory.memfd`, :mod:`~wcache.memory.descriptor`)
need neither torch nor CUDA, so nothing is imported here before it is asked for.
"""

from typing import TYPE_CHECKING, Literal

from wcache.errors import UsageError

if TYPE_CHECKING:
    from wcache.memory.slab import Memory


def open_memory(
    device: Literal["cpu", "cuda"], *, device_uuid: str | None = None, hugepages: bool = False
) -> "Memory":
    """The host's memory, or that of the GPU with ``device_uuid`` (``GPU-…``).

    ``hugepages`` is for the host alone. Raises :class:`wcache.errors.WcacheError` when there is
    no such GPU here.
    """
    if device == "cpu":
        if device_uuid is not None:
            raise UsageError(f"the cpu was asked for, and GPU {device_uuid}")
        from wcache.memory.host import HostMemory

        return HostMemory(hugepages=hugepages)
    if device_uuid is None:
        raise UsageError("no GPU was named", hint="GPUs go by UUID: nvidia-smi -L lists them")
    from wcache.memory.cuda import CudaMemory

    return CudaMemory(device_uuid)
