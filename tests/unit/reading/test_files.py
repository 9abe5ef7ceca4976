"""What is read past the page cache: cold ranges of local files that no other rank reads."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoints import write_llama
from tests.loading import EMBEDDING, LLAMA
from tests.reading import Elsewhere, content_of
from wcache.checkpoint import Checkpoint, open_checkpoint
from wcache.errors import CheckpointError
from wcache.layout import Layout
from wcache.load.placement import place
from wcache.load.plan import Plan
from wcache.load.read import read_plan
from wcache.load.reading import files
from wcache.load.reading.files import DIRECT_ALIGNMENT, SourceFile, file_system, hull_bytes
from wcache.load.reading.pieces import pieces
from wcache.memory.host import HostMapping, HostMemory
from wcache.memory.slab import Access

pytestmark = pytest.mark.unit

MIB = 1 << 20
EXT4 = 0xEF53


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    return os.urandom(5 * DIRECT_ALIGNMENT + 777)


@contextmanager
def source_file(tmp_path: Path, data: bytes) -> Iterator[SourceFile]:
    """``data`` as the content of a checkpoint's file, opened as a reader opens it."""
    path = write_llama(tmp_path / "m")
    whole = path / "model.safetensors"
    checkpoint = open_checkpoint(path)
    fd = os.open(whole, os.O_WRONLY | os.O_TRUNC)
    os.write(fd, data)
    os.fsync(fd)
    os.close(fd)
    status = whole.stat()
    stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    opened = SourceFile(checkpoint, replace(checkpoint.files[0], stamp=stamp), 1)
    opened.open()
    try:
        yield opened
    finally:
        opened.close()


def page_aligned(nbytes: int) -> memoryview:
    slab = HostMemory().create(2 * MIB)
    view = HostMemory().map([slab], Access.WRITE).buffer()
    slab.close()
    return view[:nbytes]


@pytest.mark.parametrize("start", [0, 8, 4095, 4096, 8200])
@pytest.mark.parametrize("nbytes", [1, 100, 4096, 5000, 12000])
def test_a_direct_read_brings_what_was_asked_for(
    tmp_path: Path, data: bytes, start: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever it is here: where O_DIRECT can be had at all it is used.
    monkeypatch.setattr(files, "file_system", lambda _: EXT4)
    with source_file(tmp_path, data) as file:
        view = page_aligned(hull_bytes(nbytes))
        skip = file.fill_direct(view, start, nbytes)
        assert bytes(view[skip : skip + nbytes]) == data[start : start + nbytes]


def test_a_direct_read_reaches_the_last_byte_and_not_further(tmp_path: Path, data: bytes) -> None:
    with source_file(tmp_path, data) as file:
        view = page_aligned(hull_bytes(2000))
        skip = file.fill_direct(view, len(data) - 1000, 1000)
        assert bytes(view[skip : skip + 1000]) == data[-1000:]
        with pytest.raises(CheckpointError, match="shrank while it was read"):
            file.fill_direct(view, len(data) - 1000, 1001)


def test_where_direct_reads_are_refused_the_page_cache_serves(tmp_path: Path, data: bytes) -> None:
    """The kernel says EINVAL to an address that is not aligned."""
    with source_file(tmp_path, data) as file:
        view = page_aligned(hull_bytes(5000) + 1)[1:]
        skip = file.fill_direct(view, 100, 5000)
        assert bytes(view[skip : skip + 5000]) == data[100:5100]


def test_only_what_is_not_in_the_page_cache_is_cold(tmp_path: Path, data: bytes) -> None:
    with source_file(tmp_path, data) as file:
        can_be = file_system(file._fd) in files._LOCAL_FILE_SYSTEMS
        file.fill(memoryview(bytearray(len(data))), 0)
        assert not file.is_cold(0, len(data))
        os.posix_fadvise(file._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert file.is_cold(0, len(data)) is can_be


@pytest.mark.parametrize("kind", [0x6969, 0xFF534D42, 0x65735546, 0x01021994])  # NFS, SMB, FUSE …
def test_files_that_are_not_on_a_local_disk_are_never_read_direct(
    model: Checkpoint, mapping: HostMapping, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: list[int] = []
    real = os.open

    def spied(path: str, flag: int, mode: int = 0o777) -> int:
        flags.append(flag)
        return real(path, flag, mode)

    monkeypatch.setattr(files, "file_system", lambda _: kind)
    monkeypatch.setattr(os, "open", spied)
    read_plan(model, place(model, Layout(), 0), mapping, lambda _: None)
    assert flags
    assert not any(flag & os.O_DIRECT for flag in flags)


def direct_reads(
    checkpoint: Checkpoint, planned: Plan, monkeypatch: pytest.MonkeyPatch, **options: bool
) -> set[str]:
    """Names of the targets that are read past the page cache when all is cold; checks the bytes."""
    cold: set[tuple[int, int]] = set()

    def is_cold(self: SourceFile, start: int, nbytes: int) -> bool:
        cold.add((start, nbytes))
        return self._direct >= 0

    plain, direct = Elsewhere(planned.total_bytes), Elsewhere(planned.total_bytes)
    read_plan(checkpoint, planned, plain, lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr(SourceFile, "is_cold", is_cold)
        read_plan(checkpoint, planned, direct, lambda _: None, **options)
    assert plain.content.equal(direct.content)
    return {
        target.name
        for target in planned.stored
        for piece in pieces(target)
        if (piece.start, piece.read_bytes) in cold
    }


def test_what_other_ranks_read_too_stays_in_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(write_llama(tmp_path / "m"))
    whole = place(checkpoint, Layout(), 0)
    assert direct_reads(checkpoint, whole, monkeypatch) == {one.name for one in whole.stored}
    assert direct_reads(checkpoint, whole, monkeypatch, shared=True) == set()
    sharded = place(checkpoint, Layout(tp=3), 1, parallel=LLAMA, tied=EMBEDDING)
    colwise = {one.name for one in sharded.stored if one.slice is not None and one.slice.dim == 0}
    assert direct_reads(checkpoint, sharded, monkeypatch) == colwise


@pytest.mark.parametrize("dtype", [None, "F16"])
def test_cold_files_are_read_into_host_memory_as_warm_ones(
    model: Checkpoint, mapping: HostMapping, dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a header's length puts the data on an odd byte."""
    planned = place(model, Layout(), 0, dtype=dtype)
    warm = read_plan(model, planned, mapping, lambda _: None)
    monkeypatch.setattr(SourceFile, "is_cold", lambda self, *_: self._direct >= 0)
    mapping.tensor().zero_()
    assert read_plan(model, planned, mapping, lambda _: None) == warm
    if dtype is None:
        assert content_of(model, mapping)
