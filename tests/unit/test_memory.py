"""What every kind of memory does, on the host and, where there is one, on a GPU."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.processes import end, wait_for
from wcache.errors import OutOfMemoryError, UsageError, WcacheError
from wcache.machine import devices
from wcache.manifest import SlabInfo, SlabKind
from wcache.memory import driver, open_memory
from wcache.memory.descriptor import check_descriptor
from wcache.memory.slab import Access, Mapping, Memory, Slab

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
# Large enough to be told from what else comes and goes on a GPU.
LARGE = 256 * MIB

Create = Callable[[int], Slab]
Map = Callable[[list[Slab], Access], Mapping]
Child = Callable[..., "subprocess.Popen[bytes]"]

process = pytest.mark.process


@pytest.fixture(
    params=[
        pytest.param("host", marks=pytest.mark.unit),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def memory(request: pytest.FixtureRequest) -> Memory:
    if request.param == "host":
        return open_memory("cpu")
    if not driver.driver_available():
        pytest.skip("no NVIDIA driver")
    return open_memory("cuda", device_uuid=next(iter(driver.device_ordinals())))


@pytest.fixture
def create(memory: Memory) -> Iterator[Create]:
    """Makes slabs that are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(nbytes: int) -> Slab:
            slab = memory.create(nbytes)
            stack.callback(slab.close)
            return slab

        yield make


@pytest.fixture
def map_slabs(memory: Memory) -> Iterator[Map]:
    """Makes mappings that are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(slabs: list[Slab], access: Access) -> Mapping:
            mapping = memory.map(slabs, access)
            stack.callback(mapping.close)
            return mapping

        yield make


@pytest.fixture
def child(memory: Memory) -> Iterator[Child]:
    """Runs one of the functions below as a process of its own, which is ended after the test."""
    running: list[subprocess.Popen[bytes]] = []

    def start(role: str, fd: int, info: SlabInfo) -> "subprocess.Popen[bytes]":
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.unit.test_memory", role, str(fd),
                 str(info.nbytes), info.device_uuid or ""],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[fd],
            )
        )  # fmt: skip
        return running[-1]

    yield start
    for started in running:
        end(started)
        for stream in (started.stdout, started.stderr):
            if stream is not None:
                stream.close()


def pattern(nbytes: int, device: str, seed: int = 1) -> torch.Tensor:
    """Bytes that differ everywhere."""
    words = torch.arange(nbytes // 8, device=device)
    return words.add_(seed).mul_(0x5851F42D4C957F2D).view(torch.uint8)


def write(memory: Memory, slabs: list[Slab], seed: int = 1) -> torch.Tensor:
    """Fills slabs as a loader does, seals them and returns what is in them now."""
    mapping = memory.map(slabs, Access.WRITE)
    content = pattern(mapping.nbytes, memory.device, seed)
    mapping.tensor().copy_(content)
    mapping.close()
    for slab in slabs:
        memory.seal(slab)
    return content


def test_a_slab_says_what_it_is(memory: Memory, create: Create) -> None:
    slab = create(memory.granularity)
    kind = "host" if memory.device == "cpu" else "cuda"
    assert slab.info.kind == kind
    assert slab.nbytes == memory.granularity
    assert slab.info.device_uuid == memory.device_uuid
    assert not os.get_inheritable(slab.fd)


def test_readers_see_what_was_written_before_sealing(
    memory: Memory, create: Create, map_slabs: Map
) -> None:
    slab = create(4 * MIB)
    content = write(memory, [slab])
    mapping = map_slabs([slab], Access.READ)
    tensor = mapping.tensor()
    assert tensor.device == torch.device(memory.device)
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (4 * MIB,)
    assert tensor.data_ptr() == mapping.address
    assert torch.equal(tensor, content)


def test_two_readers_share_one_slab(memory: Memory, create: Create, map_slabs: Map) -> None:
    slab = create(2 * MIB)
    content = write(memory, [slab])
    first, second = (map_slabs([slab], Access.READ) for _ in range(2))
    assert first.address != second.address
    assert torch.equal(first.tensor(), content)
    assert torch.equal(second.tensor(), content)


def test_writers_share_their_pages(memory: Memory, create: Create, map_slabs: Map) -> None:
    slab = create(2 * MIB)
    first, second = (map_slabs([slab], Access.WRITE) for _ in range(2))
    first.tensor().fill_(1)
    second.tensor()[MIB:].fill_(2)
    assert first.tensor().long().sum().item() == MIB + 2 * MIB


def test_slabs_lie_back_to_back(memory: Memory, create: Create, map_slabs: Map) -> None:
    slabs = [create(2 * MIB), create(6 * MIB), create(2 * MIB)]
    content = write(memory, slabs)
    parts = [map_slabs([slab], Access.READ).tensor() for slab in slabs]
    assert torch.equal(torch.cat(parts), content)
    assert torch.equal(map_slabs(slabs, Access.READ).tensor(), content)


def test_slabs_are_mapped_in_the_order_given(
    memory: Memory, create: Create, map_slabs: Map
) -> None:
    first, second = create(2 * MIB), create(4 * MIB)
    content = write(memory, [first, second])
    swapped = torch.cat([content[2 * MIB :], content[: 2 * MIB]])
    assert torch.equal(map_slabs([second, first], Access.READ).tensor(), swapped)


def test_a_mapping_outlives_the_descriptor(memory: Memory, map_slabs: Map) -> None:
    slab = memory.create(2 * MIB)
    content = write(memory, [slab])
    mapping = map_slabs([slab], Access.READ)
    slab.close()
    assert torch.equal(mapping.tensor(), content)


def test_a_view_outlives_the_mapping(memory: Memory, create: Create) -> None:
    slab = create(2 * MIB)
    content = write(memory, [slab])
    mapping = memory.map([slab], Access.READ)
    view = mapping.tensor()[MIB:].view(torch.int32)[1:]
    mapping.close()
    mapping.close()
    assert torch.equal(view, content[MIB:].view(torch.int32)[1:])
    with pytest.raises(ValueError, match="closed"):
        mapping.tensor()


def test_a_range_is_unmapped_with_its_last_view(memory: Memory, create: Create) -> None:
    slab = create(LARGE)
    mapping = memory.map([slab], Access.WRITE)
    view = mapping.tensor()[:10]
    address = mapping.address
    slab.close()
    held = memory_held(memory, address)
    mapping.close()
    del mapping
    assert held()
    del view
    wait_for(lambda: not held(), "the memory is given back")


def memory_held(memory: Memory, address: int) -> Callable[[], bool]:
    """Tells whether the range at ``address``, which is mapped now, still takes LARGE bytes."""
    if memory.device == "cpu":
        return lambda: f"{address:x}-" in Path("/proc/self/maps").read_text()
    before = memory.free_bytes()
    return lambda: memory.free_bytes() < before + LARGE // 2


def test_free_bytes_is_a_part_of_what_there_is(memory: Memory) -> None:
    if memory.device == "cpu":
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        total = devices.gpu(memory.device_uuid or "").total_bytes
    assert 0 < memory.free_bytes() <= total


@pytest.mark.parametrize("nbytes", [0, -2 * MIB, 1, 3 * MIB])
def test_sizes_that_are_no_multiple_of_the_granularity_are_refused(
    memory: Memory, nbytes: int
) -> None:
    with pytest.raises(WcacheError, match="must be a positive multiple"):
        memory.create(nbytes)


def test_more_than_there_is_is_refused_before_anything_is_taken(memory: Memory) -> None:
    memory.create(memory.granularity).close()
    nbytes = (memory.free_bytes() // MIB + 1024) * 4 * MIB
    open_before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (a count, no paths)
    with pytest.raises(OutOfMemoryError):
        memory.create(nbytes)
    assert len(os.listdir("/proc/self/fd")) == open_before  # noqa: PTH208 (as above)


def test_no_slabs_can_not_be_mapped(memory: Memory) -> None:
    with pytest.raises(WcacheError, match="no slabs"):
        memory.map([], Access.READ)


def test_a_slab_of_another_kind_can_not_be_mapped(memory: Memory) -> None:
    other: SlabKind = "cuda" if memory.device == "cpu" else "host"
    slab = Slab(os.memfd_create("x"), SlabInfo(kind=other, nbytes=2 * MIB))
    with pytest.raises(WcacheError, match=f"a {other} slab can not be mapped"):
        memory.map([slab], Access.READ)
    slab.close()


def test_a_daemon_accepts_the_descriptor_of_a_sealed_slab(memory: Memory, create: Create) -> None:
    slab = create(2 * MIB)
    write(memory, [slab])
    check_descriptor(slab.fd, slab.info)


@pytest.mark.unit
def test_a_gpu_goes_by_its_uuid_and_the_cpu_by_none() -> None:
    with pytest.raises(UsageError, match="no GPU was named"):
        open_memory("cuda")
    with pytest.raises(UsageError, match="the cpu was asked for"):
        open_memory("cpu", device_uuid="GPU-1")


@process
def test_content_outlives_its_killed_maker(memory: Memory, child: Child, map_slabs: Map) -> None:
    here, there = socket.socketpair()
    here.settimeout(100)
    info = SlabInfo(kind="host", nbytes=4 * MIB, device_uuid=memory.device_uuid)
    with here, there:
        maker = child("make", there.fileno(), info)
        there.close()
        said, fds, _, _ = socket.recv_fds(here, 1024, 1)
    assert fds, maker.communicate(timeout=60)
    assert end(maker, signal.SIGKILL) == -signal.SIGKILL
    slab = Slab(fds[0], SlabInfo(**json.loads(said)))
    mapping = map_slabs([slab], Access.READ)
    assert torch.equal(mapping.tensor(), pattern(4 * MIB, memory.device))
    slab.close()


@process
def test_a_store_through_a_reading_map_ends_that_process_alone(
    memory: Memory, create: Create, map_slabs: Map, child: Child
) -> None:
    slab = create(4 * MIB)
    content = write(memory, [slab])
    mapping = map_slabs([slab], Access.READ)
    offender = child("store", slab.fd, slab.info)
    out, err = offender.communicate(timeout=100)
    assert out == b"mapped\n", err
    if memory.device == "cpu":
        assert offender.returncode == -signal.SIGSEGV
    else:
        assert offender.returncode != 0
        assert b"CUDA error" in err
    assert torch.equal(mapping.tensor(), content)
    assert torch.equal(map_slabs([slab], Access.READ).tensor(), content)


@process
def test_a_process_may_end_with_tensors_over_a_map(
    memory: Memory, create: Create, child: Child
) -> None:
    slab = create(2 * MIB)
    write(memory, [slab])
    leaving = child("leave", slab.fd, slab.info)
    out, err = leaving.communicate(timeout=100)
    assert (leaving.returncode, out) == (0, b"left\n"), err
    assert b"Exception" not in err


# --- what the processes above do --------------------------------------------------------------

KEPT: list[object] = []


def main(role: str, fd: int, nbytes: int, device_uuid: str) -> None:
    # A process that faults on purpose leaves no core.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory = open_memory("cuda", device_uuid=device_uuid) if device_uuid else open_memory("cpu")
    if role == "make":
        slab = memory.create(nbytes)
        write(memory, [slab])
        info = {"kind": slab.info.kind, "nbytes": nbytes, "device_uuid": slab.info.device_uuid}
        with socket.socket(fileno=fd) as connection:
            socket.send_fds(connection, [json.dumps(info).encode()], [slab.fd])
            signal.pause()
    kind: SlabKind = "cuda" if device_uuid else "host"
    slab = Slab(fd, SlabInfo(kind=kind, nbytes=nbytes, device_uuid=device_uuid or None))
    mapping = memory.map([slab], Access.READ)
    tensor = mapping.tensor()
    if role == "store":
        print("mapped", flush=True)
        tensor[123] = 1
        if device_uuid:
            torch.cuda.synchronize()
    else:
        KEPT.extend([mapping, tensor, tensor.view(torch.int16)])
        print("left", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
