"""Checks that a descriptor is the slab that its sender says it is, without mapping it."""

import os
import re
import stat
from pathlib import Path

from wcache.errors import ProtocolError
from wcache.manifest import SlabInfo
from wcache.memory import memfd

SLAB_GRANULARITY = 2 << 20
"""Bytes; cuMemCreate's granularity, and that of host slabs so that both are cut the same way."""

# What the driver's exported memory may look like from outside. NVIDIA documents only that it is a
# descriptor, so each form below is one that a driver is known or expected to hand out:
#   a character device of major 195 (/dev/nvidiactl, /dev/nvidiaN): the resource manager's exports
#   an anonymous inode of the driver's own
#   a dma-buf, which the driver can export the same memory as
# Neither size nor device can be read from any of them; a wrong one fails when it is imported.
_NVIDIA_MAJORS = frozenset({195})
_NVIDIA_LINKS = re.compile(r"anon_inode:\[nv|/dmabuf")


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
    if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) in _NVIDIA_MAJORS:
        return
    link = str(Path(f"/proc/self/fd/{fd}").readlink())
    if not stat.S_ISCHR(status.st_mode) and _NVIDIA_LINKS.match(link):
        return
    raise ProtocolError(f"descriptor is not memory of NVIDIA's driver but {link[:100]}")
