"""Reading in parallel: what ends a read, and that nothing is left of it."""

import ctypes
import gc
import mmap
import os
import resource
from collections.abc import Callable

import pytest
import torch

from tests.reading import Elsewhere, content_of, readers
from wcache.checkpoint import Checkpoint, CheckpointFile
from wcache.checkpoint.identity import open_unchanged
from wcache.errors import CheckpointError
from wcache.layout import Layout
from wcache.load.placement import place
from wcache.load.read import read_plan
from wcache.load.reading import files
from wcache.memory.host import HostMapping, HostMemory
from wcache.memory.slab import Mapping, Slab

pytestmark = pytest.mark.unit

MIB = 1 << 20


def open_fds() -> list[str]:
    """What this process has open, of files on disk."""
    links = []
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208 (names only)
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115 (as it is)
        except FileNotFoundError:  # the folder's own
            continue
    return sorted(link for link in links if link.endswith(".safetensors") or "mem" in link)


def read(
    checkpoint: Checkpoint, mapping: Mapping, workers: int = 3, chunk_bytes: int = 4096
) -> None:
    read_plan(
        checkpoint, place(checkpoint, Layout(), 0), mapping, lambda _: None, workers=workers,
        chunk_bytes=chunk_bytes,
    )  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_any_number_of_workers_writes_the_same(
    model: Checkpoint, mapping: HostMapping, workers: int
) -> None:
    read(model, mapping, workers=workers, chunk_bytes=4096)
    assert content_of(model, mapping)
    staged = Elsewhere(mapping.nbytes)
    read(model, staged, workers=workers, chunk_bytes=4096)
    assert content_of(model, staged)


def test_a_read_leaves_no_thread_no_file_and_no_view(
    model: Checkpoint, mapping: HostMapping, slab: Slab
) -> None:
    before = open_fds()
    threads = torch.get_num_threads()
    read(model, mapping)
    assert readers() == []
    assert open_fds() == before
    assert torch.get_num_threads() == threads
    mapping.close()
    HostMemory().seal(slab)  # refused while anything can still write


def test_an_error_of_the_disk_fails_the_read_once_and_nothing_is_left(
    model: Checkpoint, mapping: HostMapping, slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc/self/mem at an address that is not mapped is a real EIO of a real preadv."""
    before = open_fds()
    opened: list[str] = []

    def bad_disk(checkpoint: Checkpoint, file: CheckpointFile) -> int:
        opened.append(file.name)
        if len(opened) < 2:
            return open_unchanged(checkpoint, file)
        return os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)

    monkeypatch.setattr(files, "open_unchanged", bad_disk)
    with pytest.raises(CheckpointError) as caught:
        read(model, mapping, workers=3, chunk_bytes=4096)
    assert caught.value.message == (f"{model.path / opened[1]} can not be read: input/output error")
    assert readers() == []
    assert open_fds() == before
    mapping.close()
    del caught  # its traceback holds views of the mapping
    gc.collect()
    HostMemory().seal(slab)


def test_a_file_that_is_replaced_while_it_is_read_is_refused(
    model: Checkpoint, mapping: HostMapping
) -> None:
    file = model.path / model.files[0].name

    def replaced(done: int) -> None:
        copy = file.with_suffix(".new")
        copy.write_bytes(file.read_bytes())
        copy.rename(file)

    with pytest.raises(CheckpointError, match="changed while it was read"):
        read_plan(model, place(model, Layout(), 0), mapping, replaced)


def test_a_daemon_that_is_gone_ends_the_read(model: Checkpoint, mapping: HostMapping) -> None:
    def gone(done: int) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        read_plan(model, place(model, Layout(), 0), mapping, gone)
    assert readers() == []


def test_populated_pages_are_written_to_without_a_fault(mapping: HostMapping) -> None:
    def faults(write: Callable[[], object]) -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        write()
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    half = mapping.nbytes // 2
    mapping.populate(5000, half - 5000)
    first = faults(lambda: ctypes.memset(mapping.address + 5000, 1, half - 5000))
    second = faults(lambda: ctypes.memset(mapping.address + half, 1, half))
    assert first < 50 < half // mmap.PAGESIZE // 2 < second
    mapping.close()
    with pytest.raises(ValueError, match="closed"):
        mapping.populate(0, 1)
