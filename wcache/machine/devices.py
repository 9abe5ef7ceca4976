"""The GPUs of this machine as NVML sees them: the only module that imports pynvml."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from wcache.errors import WcacheError

CONTEXT_BYTES = 640 << 20
"""What a CUDA context takes of a GPU's memory in each process (measured, 615 MiB on an H200)."""

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Which GPUs a process sees, and in which order."""

ComputeMode = Literal["default", "exclusive", "prohibited"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU at the moment of asking."""

    index: int
    """NVML's, in the order of PCI addresses; CUDA may number the GPUs differently."""
    uuid: str
    """``GPU-…``, as the driver names it too."""
    name: str
    total_bytes: int
    free_bytes: int
    """What no process and no descriptor holds."""
    persistence: bool | None
    """Whether the device stays initialised without users; None where the driver does not say.

    Without it the memory that descriptors hold is lost with the device's last user."""
    mig: bool = False
    """Cut into instances, so that nothing can run on the GPU as a whole."""
    compute_mode: ComputeMode = "default"
    """How many processes may use it: any number, one, or none."""


def gpus() -> tuple[Gpu, ...]:
    """Every GPU, whatever CUDA_VISIBLE_DEVICES says; none where there is no driver."""
    with _nvml() as nvml:
        return tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))


def driver_version() -> str:
    """As ``580.65.06``; empty where there is no driver."""
    with _nvml() as nvml:
        return _text(nvml.nvmlSystemGetDriverVersion())


def gpu(uuid: str) -> Gpu:
    """The GPU with that UUID; raises :class:`WcacheError` when there is none."""
    present = gpus()
    for candidate in present:
        if candidate.uuid == uuid:
            return candidate
    names = ", ".join(candidate.uuid for candidate in present)
    hint = f"GPUs are {names}" if names else "NVML shows no GPU: is the NVIDIA driver loaded?"
    raise WcacheError(f"there is no GPU {uuid} on this machine", hint=hint)


def processes(uuid: str) -> tuple[int, ...]:
    """Pids that the driver shows on a GPU; memory that descriptors hold belongs to none.

    Raises :class:`WcacheError` when there is no such GPU.
    """
    gpu(uuid)
    with _nvml() as nvml:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        return tuple(one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle))


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; all where it is not set."""
    value = os.environ.get(VISIBLE)
    return gpus() if value is None else select(gpus(), value)


def select(present: tuple[Gpu, ...], value: str) -> tuple[Gpu, ...]:
    """Applies a CUDA_VISIBLE_DEVICES ``value`` of indices or of the beginnings of UUIDs.

    As in CUDA, the first entry that names no GPU, or more than one, ends the list, and a GPU that
    is named twice leaves none. Indices count as with CUDA_DEVICE_ORDER=PCI_BUS_ID, which is the
    default order as well where all GPUs are of one kind.
    """
    chosen: list[Gpu] = []
    for entry in value.split(","):
        matches = [candidate for candidate in present if _matches(candidate, entry.strip())]
        if len(matches) != 1:
            break
        if matches[0] in chosen:
            return ()
        chosen += matches
    return tuple(chosen)


def _matches(candidate: Gpu, entry: str) -> bool:
    if entry.isdecimal():
        return candidate.index == int(entry)
    return entry.startswith("GPU-") and candidate.uuid.startswith(entry)


class _NoGpus:
    """What stands for NVML where there is no driver."""

    @staticmethod
    def nvmlDeviceGetCount() -> int:
        return 0

    @staticmethod
    def nvmlSystemGetDriverVersion() -> str:
        return ""


@contextmanager
def _nvml() -> Iterator[Any]:
    """pynvml between its init and its shutdown, which NVML counts, so that this may nest."""
    # 24 ms: not for a command that asks for no GPU. It has no type stubs, hence Any.
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no library, no driver, or no permission: no GPU for this process
        yield _NoGpus
        return
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise WcacheError(f"NVML failed: {str(error).lower()}", hint="see nvidia-smi") from None
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        persistence=_persistence(nvml, handle),
        mig=_mig(nvml, handle),
        compute_mode=_compute_mode(nvml, handle),
    )


def _persistence(nvml: Any, handle: Any) -> bool | None:
    try:
        return bool(nvml.nvmlDeviceGetPersistenceMode(handle))
    except nvml.NVMLError:
        return None


def _mig(nvml: Any, handle: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:  # a GPU that can not be cut
        return False
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _compute_mode(nvml: Any, handle: Any) -> ComputeMode:
    try:
        mode = nvml.nvmlDeviceGetComputeMode(handle)
    except nvml.NVMLError:
        return "default"
    if mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
        return "prohibited"
    exclusive = (nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, nvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD)
    return "exclusive" if mode in exclusive else "default"


def _text(value: str | bytes) -> str:
    """pynvml before version 11.515 gives bytes."""
    return value.decode() if isinstance(value, bytes) else value
