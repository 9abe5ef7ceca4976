"""The CUDA driver calls that wcache makes, checked: the only module that imports cuda.bindings."""

import ctypes
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from wcache.errors import OutOfMemoryError, WcacheError

_PCI_ADDRESS_BYTES = 32

# cuda.bindings is an extra without type stubs, so its objects are Any here and go no further than
# this module: outside it a handle, an address and a device's ordinal are plain integers.


def driver_available() -> bool:
    """True when cuda.bindings is installed, the driver loads, and it shows at least one GPU."""
    try:
        return _count() > 0
    except WcacheError:
        return False


def device_ordinals() -> dict[str, int]:
    """The ordinal of every visible GPU by its UUID, ``GPU-`` and 8-4-4-4-12 hexadecimal digits.

    The driver applies CUDA_VISIBLE_DEVICES (and CUDA_DEVICE_ORDER) itself at cuInit, and torch
    numbers what the driver shows it, so an ordinal here is N of torch's ``cuda:N``.
    """
    cuda = _driver()
    ordinals: dict[str, int] = {}
    for ordinal in range(_count()):
        uuid = _check("cuDeviceGetUuid", cuda.cuDeviceGetUuid(_device(ordinal)))
        ordinals[_uuid_text(bytes(uuid.bytes))] = ordinal
    return ordinals


def allocation_granularity(ordinal: int) -> int:
    """Bytes that the size of an allocation on this GPU has to be a multiple of."""
    cuda = _driver()
    minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    result = cuda.cuMemGetAllocationGranularity(_properties(ordinal), minimum)
    return int(_check("cuMemGetAllocationGranularity", result))


def create(ordinal: int, nbytes: int) -> int:
    """Allocates GPU memory that can be exported and returns its handle; needs no context.

    Its content is undefined. Raises :class:`OutOfMemoryError`.
    """
    return int(_check("cuMemCreate", _driver().cuMemCreate(nbytes, _properties(ordinal), 0)))


def export(handle: int) -> int:
    """A new descriptor that keeps the memory of ``handle`` alive; needs no context."""
    cuda = _driver()
    result = cuda.cuMemExportToShareableHandle(_handle(handle), _descriptor_type(), 0)
    fd = int(_check("cuMemExportToShareableHandle", result))
    # The driver promises nothing about close-on-exec, and a descriptor that leaks into a child
    # would hold the memory for as long as that child lives.
    os.set_inheritable(fd, False)
    return fd


def import_(fd: int) -> int:
    """A handle on the memory behind ``fd``, which stays the caller's; needs no context."""
    cuda = _driver()
    result = cuda.cuMemImportFromShareableHandle(fd, _descriptor_type())
    return int(_check("cuMemImportFromShareableHandle", result))


def release(handle: int) -> None:
    """Gives a handle up; what was exported or mapped from it stays."""
    _check("cuMemRelease", _driver().cuMemRelease(_handle(handle)))


def reserve(nbytes: int) -> int:
    """Addresses for ``nbytes`` with nothing behind them."""
    return int(_check("cuMemAddressReserve", _driver().cuMemAddressReserve(nbytes, 0, 0, 0)))


def free_addresses(address: int, nbytes: int) -> None:
    _check("cuMemAddressFree", _driver().cuMemAddressFree(address, nbytes))


def map_handle(address: int, nbytes: int, handle: int) -> None:
    """Puts all of an allocation at ``address``; nobody may access it yet."""
    _check("cuMemMap", _driver().cuMemMap(address, nbytes, 0, _handle(handle), 0))


def unmap(address: int, nbytes: int) -> None:
    _check("cuMemUnmap", _driver().cuMemUnmap(address, nbytes))


def set_access(address: int, nbytes: int, ordinal: int, *, writable: bool) -> None:
    """Allows the GPU ``ordinal`` to read the range, or to write to it as well."""
    cuda = _driver()
    flags = cuda.CUmemAccess_flags
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = (
        flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        if writable
        else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    )
    _check("cuMemSetAccess", cuda.cuMemSetAccess(address, nbytes, [access], 1))


@contextmanager
def primary_context(ordinal: int) -> Iterator[None]:
    """Makes the GPU's primary context, which is torch's too, current within the block."""
    cuda = _driver()
    _check("cuCtxPushCurrent", cuda.cuCtxPushCurrent(_retained_context(ordinal)))
    try:
        yield
    finally:
        _check("cuCtxPopCurrent", cuda.cuCtxPopCurrent())


def synchronize() -> None:
    """Waits for all work in the current context."""
    _check("cuCtxSynchronize", _driver().cuCtxSynchronize())


def has_context(ordinal: int) -> bool:
    """True when this process has a primary context on the GPU, which costs it some 600 MiB."""
    result = _driver().cuDevicePrimaryCtxGetState(_device(ordinal))
    _, active = _check("cuDevicePrimaryCtxGetState", result)
    return bool(active)


def pci_address(ordinal: int) -> str:
    """Where sysfs has the GPU: ``0000:3b:00.0``, below /sys/bus/pci/devices; needs no context."""
    result = _driver().cuDeviceGetPCIBusId(_PCI_ADDRESS_BYTES, _device(ordinal))
    raw = _check("cuDeviceGetPCIBusId", result)
    return bytes(raw).split(b"\0", 1)[0].decode().lower()


def copy_rows(
    ordinal: int, *, stream: int, to: int, source: int, pitch: int, width: int, rows: int
) -> None:
    """Queues a copy of ``rows`` runs of ``width`` bytes on ``stream``.

    ``source`` is the address of the first in pinned host memory, and ``pitch`` the bytes from each
    to the next; they lie back to back from ``to`` on, an address of this GPU.
    """
    cuda = _driver()
    copy = cuda.CUDA_MEMCPY2D()
    copy.srcMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_HOST
    copy.srcHost, copy.srcPitch = source, pitch
    copy.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstDevice, copy.dstPitch = to, width
    copy.WidthInBytes, copy.Height = width, rows
    with primary_context(ordinal):
        _check("cuMemcpy2DAsync", cuda.cuMemcpy2DAsync(copy, cuda.CUstream(stream)))


def compile_kernel(source: str, name: str, ordinal: int) -> int:
    """Compiles the kernel ``name`` of CUDA C ``source`` for one GPU; it stays loaded for good.

    Raises :class:`WcacheError` where NVRTC is not installed, or does not know the GPU.
    """
    cuda, nvrtc = _driver(), _compiler()
    attributes = cuda.CUdevice_attribute
    version = [
        _check("cuDeviceGetAttribute", cuda.cuDeviceGetAttribute(attribute, _device(ordinal)))
        for attribute in (
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    ]
    code = _compiled(nvrtc, source, name, "sm_{}{}".format(*version))
    with primary_context(ordinal):
        module = _check("cuModuleLoadData", cuda.cuModuleLoadData(code))
        result = cuda.cuModuleGetFunction(module, name.encode())
        return int(_check("cuModuleGetFunction", result))


def launch(
    kernel: int, ordinal: int, *, blocks: int, threads: int, stream: int, addresses: Sequence[int]
) -> None:
    """Queues ``kernel`` on ``stream``; its arguments are pointers, and memory outlives the call."""
    cuda = _driver()
    arguments = (tuple(addresses), (ctypes.c_void_p,) * len(addresses))
    with primary_context(ordinal):
        result = cuda.cuLaunchKernel(
            cuda.CUfunction(kernel), blocks, 1, 1, threads, 1, 1, 0, cuda.CUstream(stream),
            arguments, 0,
        )  # fmt: skip
        _check("cuLaunchKernel", result)


@functools.cache
def _driver() -> Any:
    """The bindings after cuInit; raises :class:`WcacheError` where there is no driver."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise WcacheError(
            "cuda-bindings is not installed", hint="pip install 'wcache[cuda]'"
        ) from None
    try:
        result = driver.cuInit(0)
    except RuntimeError:  # the bindings load libcuda.so at the first call
        raise WcacheError(
            "there is no NVIDIA driver on this machine",
            hint="wcache up --model … --device cpu needs none",
        ) from None
    (error,) = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise _failure(driver, "cuInit", error)
    return driver


def _compiler() -> Any:
    """NVRTC's bindings; raises :class:`WcacheError` where there is no NVRTC."""
    from cuda.bindings import nvrtc

    try:
        nvrtc.nvrtcVersion()
    except RuntimeError:  # the bindings load libnvrtc.so at the first call
        raise WcacheError("there is no NVRTC on this machine") from None
    return nvrtc


def _compiled(nvrtc: Any, source: str, name: str, architecture: str) -> bytes:
    """The machine code of ``source``."""

    def check(call: str, result: Any) -> Any:
        error, *values = result
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise WcacheError(f"{call}: {getattr(error, 'name', error)}")
        return values[0] if values else None

    options = [f"--gpu-architecture={architecture}".encode()]
    result = nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], [])
    program = check("nvrtcCreateProgram", result)
    try:
        check("nvrtcCompileProgram", nvrtc.nvrtcCompileProgram(program, len(options), options))
        code = b" " * int(check("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program)))
        check("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code


@functools.cache
def _retained_context(ordinal: int) -> Any:
    """The primary context, held until the process ends: torch would lose its own otherwise."""
    result = _driver().cuDevicePrimaryCtxRetain(_device(ordinal))
    return _check("cuDevicePrimaryCtxRetain", result)


def _count() -> int:
    return int(_check("cuDeviceGetCount", _driver().cuDeviceGetCount()))


def _device(ordinal: int) -> Any:
    return _check("cuDeviceGet", _driver().cuDeviceGet(ordinal))


def _handle(handle: int) -> Any:
    return _driver().CUmemGenericAllocationHandle(handle)


def _descriptor_type() -> Any:
    types = _driver().CUmemAllocationHandleType
    return types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _properties(ordinal: int) -> Any:
    cuda = _driver()
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    properties.requestedHandleTypes = _descriptor_type()
    return properties


def _uuid_text(raw: bytes) -> str:
    digits = raw.hex()
    groups = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return "GPU-" + "-".join(groups)


def _check(call: str, result: Any) -> Any:
    """What a call returned beside its status: nothing, one value, or a list of them."""
    error, *values = result
    driver = _driver()
    if error != driver.CUresult.CUDA_SUCCESS:
        raise _failure(driver, call, error)
    return values[0] if len(values) == 1 else values


def _failure(driver: Any, call: str, error: Any) -> WcacheError:
    # A newer driver may have statuses that these bindings know as a bare number.
    name = getattr(error, "name", str(error))
    if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        return OutOfMemoryError(
            f"the GPU has not enough free memory: {call}: {name}",
            hint="wcache status shows what holds it, nvidia-smi does not",
        )
    return WcacheError(f"the CUDA driver refused: {call}: {name}")
