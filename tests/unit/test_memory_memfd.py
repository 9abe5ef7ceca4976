"""Sealed memfds: what is read back is what was written, and nothing else is taken for one."""

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from wcache.errors import ProtocolError
from wcache.memory import memfd
from wcache.memory.memfd import REQUIRED_SEALS, add_seals, create_sealed, read_sealed, seals

pytestmark = pytest.mark.unit

Opened = Callable[[int], int]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Closes the descriptors that it is given after the test."""
    with ExitStack() as stack:

        def remember(fd: int) -> int:
            stack.callback(os.close, fd)
            return fd

        yield remember


@pytest.mark.parametrize("data", [b"", b"x", b"\0" * 5000, bytes(range(256)) * 40000])
def test_what_is_sealed_is_read_back(opened: Opened, data: bytes) -> None:
    fd = opened(create_sealed("manifest", data))
    assert read_sealed(fd, len(data)) == data
    assert read_sealed(fd, len(data)) == data
    assert not os.get_inheritable(fd)
    assert "manifest" in str(Path(f"/proc/self/fd/{fd}").readlink())


def test_reading_is_not_moved_by_the_offset_that_all_holders_share(opened: Opened) -> None:
    fd = opened(create_sealed("manifest", b"weights"))
    os.lseek(fd, 3, os.SEEK_SET)
    assert read_sealed(fd, 100) == b"weights"
    assert os.lseek(fd, 0, os.SEEK_CUR) == 3


def test_what_is_sealed_can_not_be_changed(opened: Opened) -> None:
    fd = opened(create_sealed("manifest", b"weights"))
    assert seals(fd) == REQUIRED_SEALS
    for change in (
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, 1),
        lambda: os.ftruncate(fd, 100),
        lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0),
    ):
        with pytest.raises(PermissionError):
            change()
    assert read_sealed(fd, 100) == b"weights"


def test_a_size_over_the_bound_is_refused_before_reading(opened: Opened) -> None:
    # 1 TiB of holes: would not come back from being read.
    fd = opened(os.memfd_create("x", os.MFD_ALLOW_SEALING))
    os.ftruncate(fd, 1 << 40)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, REQUIRED_SEALS)
    with pytest.raises(ProtocolError, match=f"memfd of {1 << 40} bytes, at most 100 are taken"):
        read_sealed(fd, 100)


@pytest.mark.parametrize(
    ("missing", "name"),
    [
        (fcntl.F_SEAL_SEAL, "seal"),
        (fcntl.F_SEAL_SHRINK, "shrink"),
        (fcntl.F_SEAL_GROW, "grow"),
        (fcntl.F_SEAL_WRITE, "write"),
    ],
)
def test_each_missing_seal_is_named(opened: Opened, missing: int, name: str) -> None:
    fd = opened(os.memfd_create("x", os.MFD_ALLOW_SEALING))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, REQUIRED_SEALS & ~missing)
    with pytest.raises(ProtocolError, match=f"not sealed: {name} missing"):
        read_sealed(fd, 100)


def test_pages_that_the_kernel_uses_for_a_moment_are_waited_for(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memfd, "_SEAL_PATIENCE_S", 60.0)
    fd = opened(os.memfd_create("slab", os.MFD_ALLOW_SEALING))
    os.write(fd, bytes(4096))
    reader, writer = map(opened, os.pipe())
    # As when it moves a page: something other than the file refers to it.
    os.splice(fd, writer, 4096, offset_src=0)
    with pytest.raises(OSError, match="busy"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, REQUIRED_SEALS)
    with ThreadPoolExecutor(1) as pool:
        sealing = pool.submit(add_seals, fd)
        with pytest.raises(TimeoutError):
            sealing.result(0.3)
        os.read(reader, 4096)
        sealing.result(20)
    assert seals(fd) == REQUIRED_SEALS


def test_a_memfd_sealed_for_future_writes_only_is_refused(opened: Opened) -> None:
    """Whoever mapped it before could still write."""
    future_write = 0x10  # linux/fcntl.h; not named by Python 3.11
    fd = opened(os.memfd_create("x", os.MFD_ALLOW_SEALING))
    some = REQUIRED_SEALS & ~fcntl.F_SEAL_WRITE | future_write
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, some)
    with pytest.raises(ProtocolError, match="write missing"):
        read_sealed(fd, 100)


def _file(folder: Path) -> int:
    return os.open(folder / "file", os.O_RDWR | os.O_CREAT)


def _path_only(folder: Path) -> int:
    _file_fd = create_sealed("x", b"weights")
    try:
        return os.open(f"/proc/self/fd/{_file_fd}", os.O_PATH)
    finally:
        os.close(_file_fd)


def _write_only(folder: Path) -> int:
    # A sealed memfd can not be opened for writing any more, so it is sealed afterwards.
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    try:
        writer = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, REQUIRED_SEALS)
        return writer
    finally:
        os.close(fd)


def _pipe(folder: Path) -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


@pytest.mark.parametrize(
    "make",
    [
        _file,
        _path_only,
        _write_only,
        _pipe,
        lambda folder: os.open(folder, os.O_RDONLY),
        lambda _: os.open("/dev/zero", os.O_RDONLY),
        lambda _: socket.socket(socket.AF_UNIX).detach(),
        lambda _: os.eventfd(1),
    ],
    ids=["file", "o_path", "write-only", "pipe", "folder", "device", "socket", "eventfd"],
)
def test_what_is_no_readable_memfd_is_refused(
    opened: Opened, tmp_path: Path, make: Callable[[Path], int]
) -> None:
    with pytest.raises(ProtocolError, match=r"not a memfd|not opened for reading"):
        read_sealed(opened(make(tmp_path)), 100)


@pytest.mark.process
def test_the_daemons_half_of_memory_needs_neither_torch_nor_ctypes_nor_cuda() -> None:
    code = (
        "import sys, wcache.memory.memfd, wcache.memory.descriptor;"
        "print(sorted({'torch', 'ctypes', 'cuda', 'pynvml', 'numpy'} & sys.modules.keys()))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    assert out.stdout == b"[]\n"
