"""Checks that a descriptor is the slab that its sender says it is, without mapping it."""

import os
import stat
from pathlib import Path

from wcache.errors import ProtocolError
from wcache.manifest import SlabInfo
from wcache.memory import memfd

SLAB_GRANULARITY = 2 << 20
"""Bytes; cuMemCreate's granularity, and that of host slabs so that both are cut the same way."""

# What exported GPU memory looks like from outside: a descriptor of /dev/nvidiactl (seen with
# driver 580 on an H200; NVIDIA documents only that it is a descriptor). Neither its size nor its
# device can be read from it; one that is not what was said fails when it is imported.
_NVIDIA_MAJOR = 195


def check_descriptor(fd: int, info: SlabInfo) -> None:
    """Raises :class:`ProtocolError`, saying why, unless ``fd`` can be the slab of ``info``.

    A host slab must be a memfd of exactly that size with every seal of
    :data:`wcache.memory.memfd.REQUIRED_SEALS`: only then can neither its sender nor a reader
    change it or cut it off under a reader's feet. A cuda slab must be a descriptor of NVIDIA's
    driver. ``fd`` stays open.
    """
    if info.nbytes <= 0 or info.nbytes % SLAB_GRANULARITY:
        raise ProtocolError(
            f"slab of {info.nbytes} bytes, must be a positive multiple of {SLAB_GRANULARITY}"
        )
    if info.kind == "host":
        _check_host(fd, info)
    else:
        _check_cuda(fd, info)


def _check_host(fd: int, info: SlabInfo) -> None:
    if info.device_uuid is not None:
        raise ProtocolError("host slab names a GPU")
    memfd.check_sealed(fd)
    nbytes = os.fstat(fd).st_size
    if nbytes != info.nbytes:
        raise ProtocolError(f"host slab has {nbytes} bytes, {info.nbytes} were said")


def _check_cuda(fd: int, info: SlabInfo) -> None:
    if not info.device_uuid:
        raise ProtocolError("cuda slab names no GPU")
    if not memfd.is_readable(fd):
        raise ProtocolError("descriptor of a cuda slab was not opened for reading")
    status = os.fstat(fd)
    if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) == _NVIDIA_MAJOR:
        return
    link = str(Path(f"/proc/self/fd/{fd}").readlink())
    raise ProtocolError(f"descriptor is not memory of NVIDIA's driver but {link[:100]}")
