"""Slabs in the host's memory: memfds, mapped back to back."""

import ctypes
import errno
import logging
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wcache.errors import OutOfMemoryError, WcacheError
from wcache.manifest import SlabInfo
from wcache.memory.available import available_bytes, free_hugepage_bytes
from wcache.memory.descriptor import SLAB_GRANULARITY
from wcache.memory.memfd import add_seals
from wcache.memory.slab import Access, Slab

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_NAME = "wcache-slab"
# fallocate(2) undoes all of a call that a signal interrupts, so a large slab is taken in steps.
_STEP_BYTES = 64 << 20

# linux/mman.h; Python's mmap module does not name them.
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_DONTDUMP = 16
_MADV_POPULATE_WRITE = 23
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

# Before Linux 6.7 a memfd with F_SEAL_WRITE can not be mapped MAP_SHARED, not even read-only: the
# kernel counted every shared map as one that could become writable. A private map shares its pages
# with the page cache as well, until it is written to, and a PROT_READ one never is.
# MAP_NORESERVE: a private map of hugepages would otherwise set aside a second copy of them. The
# price: a store through a PRIVATE map of hugepages ends the process when no hugepage is free.
_MAP_MODES = {
    Access.WRITE: (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED),
    Access.READ: (mmap.PROT_READ, mmap.MAP_PRIVATE | _MAP_NORESERVE),
    Access.PRIVATE: (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE),
}


class HostMapping:
    """Host slabs back to back; see :class:`wcache.memory.slab.Mapping`."""

    def __init__(self, address: int, nbytes: int, access: Access) -> None:
        """Takes ownership of the mapped range."""
        self.address = address
        self.nbytes = nbytes
        self.access = access
        # Tensors and memoryviews over the range hold this array, and it holds nothing: when the
        # last of them is gone, and close() has dropped it here, the range is unmapped. Not at
        # exit, where a daemon thread may still read a tensor: the process's end unmaps it anyway.
        self._array: ctypes.Array[ctypes.c_ubyte] | None
        self._array = (ctypes.c_ubyte * nbytes).from_address(address)
        weakref.finalize(self._array, _libc.munmap, address, nbytes).atexit = False

    def tensor(self) -> "torch.Tensor":
        """The whole range as ``uint8[nbytes]`` on the CPU, without a copy.

        A store into a tensor of an :attr:`Access.READ` mapping ends the process with SIGSEGV.
        """
        import torch

        return torch.frombuffer(self._open_array(), dtype=torch.uint8)

    def buffer(self) -> memoryview:
        """The whole range as bytes, to be read into with os.preadv(2).

        The range stays mapped while the view, or a slice of it, is there, also after
        :meth:`close`. It is read-only unless a store would be allowed.
        """
        view = memoryview(self._open_array()).cast("B")
        return view.toreadonly() if self.access is Access.READ else view

    def populate(self, start: int, nbytes: int) -> None:
        """Makes the pages of ``nbytes`` from ``start`` on ready to be written to, in one call.

        A slab has its pages from the start, but each is cleared and put into the map at the first
        store. Done by whoever is about to fill a few MiB, just before, it makes reading 5.7 GB/s
        instead of 4.8 with two threads (measured); it may be done by many threads at once. Before
        Linux 5.14, which can not do it, every store takes care of its page as ever.
        """
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        self._open_array()
        _libc.madvise(self.address + first, start + nbytes - first, _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Gives the range up; it is unmapped when no tensor and no view of it is left."""
        self._array = None

    def _open_array(self) -> "ctypes.Array[ctypes.c_ubyte]":
        if self._array is None:
            raise ValueError("the mapping is closed")
        return self._array


class HostMemory:
    """The host's memory; see :class:`wcache.memory.slab.Memory`."""

    def __init__(self, *, hugepages: bool = False) -> None:
        """``hugepages``: take 2 MiB pages for the slabs for which enough of them are free."""
        self.granularity = SLAB_GRANULARITY
        self.device = "cpu"
        self.device_uuid: str | None = None
        self.hugepages = hugepages

    def free_bytes(self) -> int:
        """MemAvailable within the limits of the cgroup, and free hugepages if they may be used."""
        return available_bytes() + (free_hugepage_bytes() if self.hugepages else 0)

    def create(self, nbytes: int) -> Slab:
        """Allocates every page of a slab, so that no later access can fail for want of memory.

        Raises :class:`OutOfMemoryError`; nothing is kept then.
        """
        if nbytes <= 0 or nbytes % self.granularity:
            raise WcacheError(
                f"slab of {nbytes} bytes, must be a positive multiple of {self.granularity}"
            )
        fd = self._create_huge(nbytes) if self.hugepages else None
        if fd is None:
            # Asked first: where a cgroup's limit is hit the kernel may kill instead of refusing.
            free = available_bytes()
            if nbytes > free:
                raise _out_of_memory(nbytes, free)
            fd = _allocate(nbytes, 0)
        return Slab(fd, SlabInfo(kind="host", nbytes=nbytes))

    def seal(self, slab: Slab) -> None:
        """Fixes size and content for good.

        Raises :class:`WcacheError` while anything can still write: a writable mapping that was
        not closed, or one that a tensor or a memoryview keeps.
        """
        try:
            add_seals(slab.fd)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise WcacheError(
                "slab can not be sealed while it is mapped for writing",
                hint="close the mapping and drop its tensors and buffers first",
            ) from None

    def map(self, slabs: Sequence[Slab], access: Access) -> HostMapping:
        """Maps ``slabs`` back to back in their order; raises :class:`WcacheError`.

        Core dumps leave the range out: it can be larger than the disk that they go to.
        """
        for slab in slabs:
            _check_size(slab)
        nbytes = sum(slab.nbytes for slab in slabs)
        if not nbytes:
            raise WcacheError("there are no slabs to map")
        address = _reserve(nbytes)
        try:
            protection, flags = _MAP_MODES[access]
            place = address
            for slab in slabs:
                _mmap(place, slab.nbytes, protection, flags | _MAP_FIXED, slab.fd)
                place += slab.nbytes
        except BaseException:
            _libc.munmap(address, nbytes)
            raise
        _libc.madvise(address, nbytes, _MADV_DONTDUMP)
        return HostMapping(address, nbytes, access)

    def _create_huge(self, nbytes: int) -> int | None:
        """The descriptor of a slab in hugepages, or None where there are not enough of them."""
        free = free_hugepage_bytes()
        if nbytes <= free:
            try:
                return _allocate(nbytes, os.MFD_HUGETLB | os.MFD_HUGE_2MB)
            except OutOfMemoryError:
                # Somebody else was faster, or a hugetlb cgroup allows fewer than are free.
                free = free_hugepage_bytes()
        log.warning(
            "slab of %d bytes is in ordinary pages: %d bytes are free in hugepages", nbytes, free
        )
        return None


def _allocate(nbytes: int, flags: int) -> int:
    """A memfd with all of its pages; raises :class:`WcacheError`."""
    fd = -1
    try:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        for offset in range(0, nbytes, _STEP_BYTES):
            os.posix_fallocate(fd, offset, min(_STEP_BYTES, nbytes - offset))
    except BaseException as error:
        if fd >= 0:
            os.close(fd)
        if isinstance(error, OSError):
            raise _creation_error(error, nbytes) from None
        raise
    return fd


def _creation_error(error: OSError, nbytes: int) -> Exception:
    """What an operator can mend, as an error for him; anything else as it came."""
    match error.errno:
        case errno.ENOMEM | errno.ENOSPC:
            return _out_of_memory(nbytes, available_bytes())
        case errno.EMFILE | errno.ENFILE:
            return WcacheError(
                "slab can not be created: too many open files",
                hint="raise LimitNOFILE= (ulimit -n), or memory.slab_bytes for fewer slabs",
            )
        case errno.EFBIG:
            return WcacheError(
                f"slab of {nbytes} bytes is over the limit for the size of a file",
                hint="raise LimitFSIZE= (ulimit -f)",
            )
    return error


def _out_of_memory(nbytes: int, free: int) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"slab of {nbytes} bytes does not fit in the host's memory, {free} bytes are free",
        hint="free memory, raise the cgroup's limit (MemoryMax=), or spread over more ranks",
    )


def _check_size(slab: Slab) -> None:
    """A map that reaches over the end of its memfd would be a SIGBUS at some later time."""
    if slab.info.kind != "host":
        raise WcacheError(f"a {slab.info.kind} slab can not be mapped as host memory")
    if slab.nbytes <= 0 or slab.nbytes % SLAB_GRANULARITY:
        raise WcacheError(f"slab of {slab.nbytes} bytes can not be mapped")
    nbytes = os.fstat(slab.fd).st_size
    if nbytes != slab.nbytes:
        raise WcacheError(f"slab has {nbytes} bytes, {slab.nbytes} were said")


def _reserve(nbytes: int) -> int:
    """Addresses for ``nbytes``, on a 2 MiB boundary as a map of hugepages needs it."""
    spare = SLAB_GRANULARITY
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    start = _mmap(None, nbytes + spare, _PROT_NONE, flags, -1)
    address = -(-start // spare) * spare
    if head := address - start:
        _libc.munmap(start, head)
    if tail := spare - head:
        _libc.munmap(address + nbytes, tail)
    return address


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if result == _MAP_FAILED:
        number = ctypes.get_errno()
        raise WcacheError(
            f"{nbytes} bytes can not be mapped: {os.strerror(number).lower()}",
            hint="see LimitAS= (ulimit -v) and vm.max_map_count" if number == errno.ENOMEM else "",
        )
    assert isinstance(result, int)
    return result
