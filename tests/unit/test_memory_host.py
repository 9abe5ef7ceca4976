"""What host memory does beyond any memory: seals, private pages, buffers, hugepages."""

import gc
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from wcache.errors import OutOfMemoryError, WcacheError
from wcache.manifest import SlabInfo
from wcache.memory import host
from wcache.memory.available import free_hugepage_bytes
from wcache.memory.host import HostMemory
from wcache.memory.memfd import REQUIRED_SEALS, seals
from wcache.memory.slab import Access, Slab

pytestmark = pytest.mark.unit

MIB = 1 << 20


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory()


@pytest.fixture
def slab(memory: HostMemory) -> Iterator[Slab]:
    made = memory.create(4 * MIB)
    yield made
    made.close()


@pytest.fixture
def sealed(memory: HostMemory, slab: Slab) -> Slab:
    """A slab with a 7 in every byte."""
    os.pwrite(slab.fd, b"\7" * slab.nbytes, 0)
    memory.seal(slab)
    return slab


def is_mapped(address: int) -> bool:
    gc.collect()
    return f"{address:x}-" in Path("/proc/self/maps").read_text()


def test_every_page_is_there_from_the_start(slab: Slab) -> None:
    status = os.fstat(slab.fd)
    assert status.st_size == slab.nbytes
    assert status.st_blocks * 512 >= slab.nbytes


def test_a_sealed_slab_can_not_be_changed_by_anyone_with_its_descriptor(
    memory: HostMemory, sealed: Slab
) -> None:
    assert seals(sealed.fd) & REQUIRED_SEALS == REQUIRED_SEALS
    with pytest.raises(PermissionError):
        os.pwrite(sealed.fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(sealed.fd, 0)
    with pytest.raises(WcacheError, match="can not be mapped"):
        memory.map([sealed], Access.WRITE)


@pytest.mark.parametrize("held", ["mapping", "tensor", "buffer"])
def test_sealing_is_refused_while_something_can_still_write(
    memory: HostMemory, slab: Slab, held: str
) -> None:
    mapping = memory.map([slab], Access.WRITE)
    keep: object = {
        "mapping": None,
        "tensor": mapping.tensor()[5:],
        "buffer": mapping.buffer()[5:],
    }[held]
    if held != "mapping":
        mapping.close()
    with pytest.raises(WcacheError, match="mapped for writing") as raised:
        memory.seal(slab)
    assert "close the mapping" in raised.value.hint
    mapping.close()
    del keep
    memory.seal(slab)


def test_a_reading_map_does_not_stand_in_the_way_of_sealing(memory: HostMemory, slab: Slab) -> None:
    mapping = memory.map([slab], Access.READ)
    memory.seal(slab)
    mapping.close()


def test_a_store_through_a_private_map_is_seen_by_nobody_else(
    memory: HostMemory, sealed: Slab
) -> None:
    private, reader = memory.map([sealed], Access.PRIVATE), memory.map([sealed], Access.READ)
    private.tensor()[100] = 1
    assert private.tensor()[99:102].tolist() == [7, 1, 7]
    assert reader.tensor()[99:102].tolist() == [7, 7, 7]
    assert os.pread(sealed.fd, 3, 99) == b"\7\7\7"
    private.close()
    reader.close()


def test_files_are_read_straight_into_a_buffer(
    memory: HostMemory, slab: Slab, tmp_path: Path
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(256)))
    mapping = memory.map([slab], Access.WRITE)
    with file.open("rb") as source:
        assert os.preadv(source.fileno(), [mapping.buffer()[1000:1256]], 0) == 256
    assert mapping.tensor()[1000:1256].tolist() == list(range(256))
    mapping.close()
    assert os.pread(slab.fd, 256, 1000) == bytes(range(256))


def test_a_buffer_covers_the_range_byte_by_byte(memory: HostMemory, sealed: Slab) -> None:
    mapping = memory.map([sealed], Access.READ)
    buffer = mapping.buffer()
    assert (buffer.format, buffer.nbytes, buffer.readonly) == ("B", sealed.nbytes, True)
    with pytest.raises(TypeError):
        buffer[0] = 1
    mapping.close()


def test_a_buffer_outlives_the_mapping(memory: HostMemory, sealed: Slab) -> None:
    mapping = memory.map([sealed], Access.READ)
    address = mapping.address
    part = mapping.buffer()[10:20]
    mapping.close()
    with pytest.raises(ValueError, match="closed"):
        mapping.buffer()
    assert bytes(part) == b"\7" * 10
    assert is_mapped(address)
    part.release()
    del part
    assert not is_mapped(address)


def test_a_mapping_that_is_dropped_is_unmapped(memory: HostMemory, sealed: Slab) -> None:
    mapping = memory.map([sealed], Access.READ)
    address = mapping.address
    assert is_mapped(address)
    del mapping
    assert not is_mapped(address)


def test_a_parameter_keeps_the_range_mapped(memory: HostMemory, sealed: Slab) -> None:
    mapping = memory.map([sealed], Access.READ)
    address = mapping.address
    view = mapping.tensor().view(torch.bfloat16)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(view[:64].view(8, 8), requires_grad=False)
    mapping.close()
    del mapping, view
    assert is_mapped(address)
    del module
    assert not is_mapped(address)


def test_ranges_begin_where_a_hugepage_could(memory: HostMemory, sealed: Slab) -> None:
    mappings = [memory.map([sealed], Access.READ) for _ in range(3)]
    assert all(mapping.address % (2 * MIB) == 0 for mapping in mappings)
    for mapping in mappings:
        mapping.close()


def test_a_slab_larger_than_its_memfd_is_refused_and_nothing_stays_mapped(
    memory: HostMemory, sealed: Slab
) -> None:
    before = Path("/proc/self/maps").read_text().count("wcache-slab")
    lie = Slab(os.dup(sealed.fd), SlabInfo(kind="host", nbytes=6 * MIB))
    with pytest.raises(WcacheError, match=f"slab has {4 * MIB} bytes, {6 * MIB} were said"):
        memory.map([sealed, lie], Access.READ)
    lie.close()
    assert Path("/proc/self/maps").read_text().count("wcache-slab") == before


def test_a_failing_map_leaves_nothing_mapped(memory: HostMemory, slab: Slab, sealed: Slab) -> None:
    fresh = memory.create(2 * MIB)
    before = Path("/proc/self/maps").read_text().count("wcache-slab")
    with pytest.raises(WcacheError, match="can not be mapped"):
        memory.map([fresh, sealed], Access.WRITE)
    assert Path("/proc/self/maps").read_text().count("wcache-slab") == before
    fresh.close()


def test_a_full_cgroup_is_said_before_the_kernel_kills(
    memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: MIB)
    with pytest.raises(OutOfMemoryError, match=f"slab of {2 * MIB} bytes .* {MIB} bytes are free"):
        memory.create(2 * MIB)
    assert memory.free_bytes() == MIB


def test_too_many_open_files_are_said_so(memory: HostMemory) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
    try:
        with pytest.raises(WcacheError, match="too many open files"):
            host._allocate(2 * MIB, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_limit_on_file_sizes_is_said_so_and_nothing_is_kept(memory: HostMemory) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208 (names only)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * MIB, hard))
    try:
        with pytest.raises(WcacheError, match="over the limit for the size of a file"):
            memory.create(4 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 (names only)


def test_ordinary_pages_are_taken_and_said_so_where_there_are_no_hugepages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host, "free_hugepage_bytes", lambda: 0)
    with caplog.at_level(logging.WARNING):
        slab = HostMemory(hugepages=True).create(2 * MIB)
    assert os.fstat(slab.fd).st_blksize < 2 * MIB
    assert "is in ordinary pages" in caplog.text
    slab.close()


@pytest.mark.hugepages
def test_ordinary_pages_are_taken_where_somebody_else_was_faster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = free_hugepage_bytes() + 2 * MIB
    if asked > 64 * MIB:
        pytest.skip("too many hugepages are free to take one more")
    monkeypatch.setattr(host, "free_hugepage_bytes", lambda: asked)
    with caplog.at_level(logging.WARNING):
        slab = HostMemory(hugepages=True).create(asked)
    assert os.fstat(slab.fd).st_blksize < 2 * MIB
    assert "is in ordinary pages" in caplog.text
    slab.close()


@pytest.mark.hugepages
@pytest.mark.skipif(free_hugepage_bytes() < 8 * MIB, reason="no free hugepages on this machine")
def test_hugepages_are_taken_sealed_and_mapped_without_a_second_copy() -> None:
    memory = HostMemory(hugepages=True)
    free = free_hugepage_bytes()
    slab = memory.create(4 * MIB)
    assert os.fstat(slab.fd).st_blksize == 2 * MIB
    assert free_hugepage_bytes() == free - 4 * MIB
    writer = memory.map([slab], Access.WRITE)
    writer.tensor().fill_(3)
    writer.close()
    memory.seal(slab)
    readers = [memory.map([slab], Access.READ) for _ in range(3)]
    assert all(int(reader.tensor().long().sum()) == 3 * 4 * MIB for reader in readers)
    assert free_hugepage_bytes() == free - 4 * MIB
    for reader in readers:
        reader.close()
    slab.close()
    assert free_hugepage_bytes() == free
