"""Descriptors that are not the slab that was announced are refused, with the reason."""

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from wcache.errors import ProtocolError
from wcache.manifest import SlabInfo
from wcache.memory import descriptor
from wcache.memory.descriptor import check_descriptor
from wcache.memory.memfd import REQUIRED_SEALS

pytestmark = pytest.mark.unit

MIB = 1 << 20
UUID = "GPU-00000000-0000-0000-0000-000000000001"
HOST = SlabInfo(kind="host", nbytes=4 * MIB)
CUDA = SlabInfo(kind="cuda", nbytes=4 * MIB, device_uuid=UUID)

Opened = Callable[[int], int]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Closes the descriptors that it is given after the test."""
    with ExitStack() as stack:

        def remember(fd: int) -> int:
            stack.callback(os.close, fd)
            return fd

        yield remember


def memfd(nbytes: int = 4 * MIB, seals: int = REQUIRED_SEALS) -> int:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_a_sealed_memfd_of_the_announced_size_is_a_host_slab(opened: Opened) -> None:
    fd = opened(memfd())
    check_descriptor(fd, HOST)
    os.fstat(fd)


@pytest.mark.parametrize("nbytes", [0, -2 * MIB, 1, 3 * MIB, 1 << 70])
@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_a_size_that_no_slab_has_is_refused(opened: Opened, kind: str, nbytes: int) -> None:
    info = SlabInfo(
        kind="cuda" if kind == "cuda" else "host",
        nbytes=nbytes,
        device_uuid=UUID if kind == "cuda" else None,
    )
    with pytest.raises(ProtocolError):
        check_descriptor(opened(memfd()), info)


@pytest.mark.parametrize("nbytes", [0, 2 * MIB, 4 * MIB - 1, 4 * MIB + 1, 6 * MIB])
def test_a_host_slab_of_another_size_is_refused(opened: Opened, nbytes: int) -> None:
    with pytest.raises(ProtocolError, match=f"has {nbytes} bytes, {4 * MIB} were said"):
        check_descriptor(opened(memfd(nbytes)), HOST)


@pytest.mark.parametrize(
    "missing",
    [fcntl.F_SEAL_SEAL, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE, REQUIRED_SEALS],
)
def test_a_host_slab_that_could_change_is_refused(opened: Opened, missing: int) -> None:
    with pytest.raises(ProtocolError, match="not sealed"):
        check_descriptor(opened(memfd(seals=REQUIRED_SEALS & ~missing)), HOST)


def test_a_host_slab_that_readers_could_not_map_is_refused(opened: Opened) -> None:
    fd = opened(os.memfd_create("x", os.MFD_ALLOW_SEALING))
    os.ftruncate(fd, 4 * MIB)
    writer = opened(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, REQUIRED_SEALS)
    with pytest.raises(ProtocolError, match="not opened for reading"):
        check_descriptor(writer, HOST)
    with pytest.raises(ProtocolError, match="not opened for reading"):
        check_descriptor(opened(os.open(f"/proc/self/fd/{fd}", os.O_PATH)), HOST)


def test_a_host_slab_that_names_a_gpu_and_a_cuda_slab_that_names_none_are_refused(
    opened: Opened,
) -> None:
    fd = opened(memfd())
    with pytest.raises(ProtocolError, match="names a GPU"):
        check_descriptor(fd, SlabInfo(kind="host", nbytes=4 * MIB, device_uuid=UUID))
    with pytest.raises(ProtocolError, match="names no GPU"):
        check_descriptor(fd, SlabInfo(kind="cuda", nbytes=4 * MIB))


@pytest.mark.parametrize("info", [HOST, CUDA], ids=["host", "cuda"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: os.open("/dev/null", os.O_RDWR),
        lambda: socket.socket(socket.AF_UNIX).detach(),
        lambda: os.eventfd(1),
        lambda: os.open("/proc/self/maps", os.O_RDONLY),
        lambda: os.open("/", os.O_RDONLY),
    ],
    ids=["device", "socket", "eventfd", "proc", "folder"],
)
def test_what_is_no_memory_is_refused(
    opened: Opened, info: SlabInfo, make: Callable[[], int]
) -> None:
    with pytest.raises(ProtocolError, match="descriptor"):
        check_descriptor(opened(make()), info)


def test_host_memory_is_no_cuda_slab(opened: Opened) -> None:
    with pytest.raises(ProtocolError, match="not memory of NVIDIA's driver but /memfd:x"):
        check_descriptor(opened(memfd()), CUDA)


def test_a_file_with_the_name_of_a_dmabuf_is_no_cuda_slab(opened: Opened) -> None:
    """Every link that is not to a path begins with a name that its maker could not choose."""
    fd = opened(os.memfd_create("dmabuf"))
    with pytest.raises(ProtocolError, match="but /memfd:dmabuf"):
        check_descriptor(fd, CUDA)


def test_a_device_of_nvidias_major_is_a_cuda_slab(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    # /dev/null stands for /dev/nvidiactl, which is not on every machine.
    monkeypatch.setattr(descriptor, "_NVIDIA_MAJOR", 1)
    check_descriptor(opened(os.open("/dev/null", os.O_RDWR)), CUDA)
    with pytest.raises(ProtocolError, match="not opened for reading"):
        check_descriptor(opened(os.open("/dev/null", os.O_PATH)), CUDA)
