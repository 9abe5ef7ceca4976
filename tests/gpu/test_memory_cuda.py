"""What GPU memory does beyond any memory: contexts, UUIDs, kinds of access, the digest."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path

import pytest
import torch

from tests.processes import wait_for
from wcache.errors import WcacheError
from wcache.machine import devices
from wcache.manifest import SlabInfo
from wcache.memory import driver, mix_kernel, mixing
from wcache.memory.cuda import CudaMemory
from wcache.memory.descriptor import check_descriptor
from wcache.memory.digest import digest, digests
from wcache.memory.slab import Access, Slab

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not driver.driver_available(), reason="no NVIDIA driver"),
]

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
LARGE = 512 * MIB

Create = Callable[[int], Slab]


@pytest.fixture
def memory() -> CudaMemory:
    return CudaMemory(next(iter(driver.device_ordinals())))


@pytest.fixture
def create(memory: CudaMemory) -> Iterator[Create]:
    """Makes slabs that are closed after the test."""
    with ExitStack() as stack:

        def make(nbytes: int) -> Slab:
            slab = memory.create(nbytes)
            stack.callback(slab.close)
            return slab

        yield make


def fresh(code: str, environment: dict[str, str] | None = None) -> str:
    """Runs ``code`` in a process that has not touched the GPU and returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        check=True,
        timeout=100,
        text=True,
    )
    return done.stdout.strip()


def test_creating_needs_no_context() -> None:
    said = fresh(
        "from wcache.memory import driver, open_memory\n"
        "uuid, ordinal = next(iter(driver.device_ordinals().items()))\n"
        "memory = open_memory('cuda', device_uuid=uuid)\n"
        "slab = memory.create(4 << 20)\n"
        "import sys\n"
        "print(driver.has_context(ordinal), 'torch' in sys.modules, memory.free_bytes() > 0)\n"
    )
    assert said == "False False True"


def test_mapping_makes_the_context_that_torch_uses(memory: CudaMemory, create: Create) -> None:
    slab = create(2 * MIB)
    mapping = memory.map([slab], Access.WRITE)
    assert driver.has_context(torch.device(memory.device).index)
    mapping.tensor().fill_(5)
    on_torchs_own = torch.full((2 * MIB,), 5, dtype=torch.uint8, device=memory.device)
    assert torch.equal(mapping.tensor(), on_torchs_own)
    mapping.close()


def test_the_first_map_may_come_before_torch_has_started() -> None:
    said = fresh(
        "from wcache.memory import driver, open_memory\n"
        "from wcache.memory.slab import Access\n"
        "uuid = next(iter(driver.device_ordinals()))\n"
        "memory = open_memory('cuda', device_uuid=uuid)\n"
        "slab = memory.create(4 << 20)\n"
        "mapping = memory.map([slab], Access.WRITE)\n"
        "mapping.tensor().fill_(2)\n"
        "print(int(mapping.tensor().long().sum()) == 2 * (4 << 20))\n"
    )
    assert said == "True"


def test_a_uuid_is_the_one_that_nvml_and_torch_say(memory: CudaMemory) -> None:
    assert devices.gpu(memory.device_uuid or "").uuid == memory.device_uuid
    properties = torch.cuda.get_device_properties(torch.device(memory.device))
    assert f"GPU-{properties.uuid}" == memory.device_uuid


def test_every_visible_gpu_is_numbered_as_torch_numbers_it() -> None:
    for uuid, ordinal in driver.device_ordinals().items():
        assert f"GPU-{torch.cuda.get_device_properties(ordinal).uuid}" == uuid


def test_visible_devices_are_the_drivers() -> None:
    uuids = [gpu.uuid for gpu in devices.visible_gpus()]
    assert sorted(uuids) == sorted(driver.device_ordinals())
    code = "from wcache.memory import driver; print(*driver.device_ordinals())"
    assert fresh(code, {"CUDA_VISIBLE_DEVICES": uuids[-1]}) == uuids[-1]
    code = "from wcache.memory import driver; print(driver.driver_available())"
    assert fresh(code, {"CUDA_VISIBLE_DEVICES": ""}) == "False"


def test_a_gpu_that_is_not_visible_is_refused_with_those_that_are() -> None:
    with pytest.raises(WcacheError, match="is not visible to this process") as raised:
        CudaMemory("GPU-00000000-0000-0000-0000-000000000000")
    assert next(iter(driver.device_ordinals())) in raised.value.hint


def test_there_are_no_private_pages(memory: CudaMemory, create: Create) -> None:
    with pytest.raises(WcacheError, match="no private pages"):
        memory.map([create(2 * MIB)], Access.PRIVATE)


def test_a_slab_of_another_gpu_is_refused(memory: CudaMemory, create: Create) -> None:
    slab = create(2 * MIB)
    other = Slab(os.dup(slab.fd), SlabInfo(kind="cuda", nbytes=2 * MIB, device_uuid="GPU-x"))
    with pytest.raises(WcacheError, match="slab lies on GPU GPU-x"):
        memory.map([other], Access.READ)
    other.close()


def test_a_descriptor_that_is_no_gpu_memory_is_refused_and_nothing_stays(
    memory: CudaMemory, create: Create
) -> None:
    good = create(2 * MIB)
    info = SlabInfo(kind="cuda", nbytes=2 * MIB, device_uuid=memory.device_uuid)
    bad = Slab(os.memfd_create("x"), info)
    with pytest.raises(WcacheError, match="the CUDA driver refused"):
        memory.map([good, bad], Access.READ)
    bad.close()
    mapping = memory.map([good], Access.READ)
    mapping.close()


def test_a_slab_that_is_smaller_than_said_is_refused(memory: CudaMemory, create: Create) -> None:
    slab = create(2 * MIB)
    info = SlabInfo(kind="cuda", nbytes=4 * MIB, device_uuid=memory.device_uuid)
    lie = Slab(os.dup(slab.fd), info)
    with pytest.raises(WcacheError, match="the CUDA driver refused"):
        memory.map([lie], Access.READ)
    lie.close()


def test_a_daemon_sees_what_an_exported_descriptor_is(create: Create) -> None:
    """Says in the output (-rP) what the driver's descriptors look like from outside."""
    slab = create(2 * MIB)
    status = os.fstat(slab.fd)
    link = Path(f"/proc/self/fd/{slab.fd}").readlink()
    print(f"mode {status.st_mode:o} device {os.major(status.st_rdev)}: {link}")
    check_descriptor(slab.fd, slab.info)


def test_a_queued_kernel_still_finds_its_memory(memory: CudaMemory, create: Create) -> None:
    slab = create(LARGE)
    mapping = memory.map([slab], Access.WRITE)
    tensor = mapping.tensor()
    for value in range(50):
        tensor.fill_(value)
    mapping.close()
    del mapping, tensor
    torch.cuda.synchronize()
    reader = memory.map([slab], Access.READ)
    assert int(reader.tensor().max()) == int(reader.tensor().min()) == 49
    reader.close()


def test_closing_every_descriptor_frees_the_memory(memory: CudaMemory) -> None:
    memory.create(2 * MIB).close()
    before = memory.free_bytes()
    slab = memory.create(LARGE)
    wait_for(lambda: memory.free_bytes() <= before - LARGE // 2, "the memory is taken")
    slab.close()
    wait_for(lambda: memory.free_bytes() > before - LARGE // 2, "the memory is given back")


def test_mapping_and_unmapping_a_hundred_times_leaves_nothing(
    memory: CudaMemory, create: Create
) -> None:
    slabs = [create(64 * MIB) for _ in range(4)]
    memory.map(slabs, Access.READ).close()
    before = memory.free_bytes()
    for _ in range(100):
        memory.map(slabs, Access.READ).close()
    wait_for(lambda: memory.free_bytes() > before - 64 * MIB, "the memory is given back")


def test_the_digest_is_the_hosts(memory: CudaMemory) -> None:
    generator = torch.Generator().manual_seed(3)
    data = torch.randint(0, 256, (40 * MIB + 5,), dtype=torch.uint8, generator=generator)
    assert digest(data.to(memory.device)) == digest(data)


def kernel_sums(content: torch.Tensor, spans: list[tuple[int, int]]) -> list[int]:
    offsets, sizes = torch.tensor(spans, dtype=torch.int64).unbind(1)
    found = mix_kernel.sums(content, offsets, sizes)
    assert found is not None
    return found.tolist()


def test_the_kernel_and_torch_come_to_the_same_sums(memory: CudaMemory) -> None:
    """Lengths around a word, a pair of words and a block; places on 16 bytes, 8, and neither."""
    host = torch.randint(0, 256, (3 * MIB + 5,), dtype=torch.uint8)
    data = host.to(memory.device)
    block = mix_kernel._BLOCK_BYTES
    lengths = (0, 1, 7, 8, 9, 15, 16, 17, block - 8, block, block + 1, 2 * block + 24, 2 * MIB + 3)
    spans = [(start, length) for start in (0, 8, 1, 16) for length in lengths]
    found = kernel_sums(data, spans)
    assert found == mixing.sums(data, spans).tolist() == mixing.sums(host, spans).tolist()


def odd_spans(content_bytes: int, count: int) -> list[tuple[int, int]]:
    """Spans anywhere, most of them small; no two are the same, so nor are their sums."""
    chosen = random.Random(11)
    block = mix_kernel._BLOCK_BYTES
    spans: set[tuple[int, int]] = set()
    while len(spans) < count:
        most = chosen.choice([9, 100, 4096, 4096, block + 9, 3 * block])
        length = chosen.randint(1, most)
        spans.add((chosen.randint(0, content_bytes - length), length))
    return chosen.sample(sorted(spans), count)


def test_each_of_many_odd_spans_has_the_digest_of_its_own_bytes(memory: CudaMemory) -> None:
    """Not those of the span beside it in the table, nor of one that begins or ends a byte away."""
    host = torch.randint(0, 256, (8 * MIB + 13,), dtype=torch.uint8)
    # Begins on no word, as a tensor within another may.
    content = host.to(memory.device)[5:]
    spans = odd_spans(content.numel(), 3000)
    spans += [(0, content.numel()), (content.numel() - 1, 1), (content.numel(), 0)]
    found = digests(content, spans)
    # Each alone, through a tensor of its own, by torch's operations on the other device.
    alone = [digest(host[5 + offset : 5 + offset + length].clone()) for offset, length in spans]
    assert found == alone
    assert kernel_sums(content, spans) == mixing.sums(content, spans).tolist()
    wrong = [
        (max(offset - 1, 0), length) if length % 2 else (offset, length - 1)
        for offset, length in spans
        if length and offset
    ]
    right = [one for one, (offset, length) in zip(found, spans, strict=True) if length and offset]
    # A single byte may be that beside it, so a few may be the same by chance.
    same = sum(one == two for one, two in zip(digests(content, wrong), right, strict=True))
    assert same < 50


def test_a_changed_byte_changes_the_digests_of_the_spans_that_have_it(
    memory: CudaMemory,
) -> None:
    content = torch.randint(0, 256, (2 * MIB,), dtype=torch.uint8).to(memory.device)
    spans = odd_spans(content.numel(), 2000)
    before = digests(content, spans)
    offset, length = max(spans, key=itemgetter(1))
    for place in (offset, offset + length // 2, offset + length - 1):
        content[place] ^= 128
        after = digests(content, spans)
        changed = {
            n for n, pair in enumerate(zip(before, after, strict=True)) if len(set(pair)) > 1
        }
        having = {n for n, (start, size) in enumerate(spans) if start <= place < start + size}
        assert changed == having
        content[place] ^= 128


def test_twenty_thousand_storages_of_slabs_are_digested_at_once(
    memory: CudaMemory, create: Create
) -> None:
    """As wcache verify has them: storages of odd lengths, each from a multiple of 256 bytes on."""
    slabs = [create(16 * MIB) for _ in range(2)]
    mapping = memory.map(slabs, Access.WRITE)
    content = mapping.tensor()
    host = torch.randint(0, 256, (32 * MIB,), dtype=torch.uint8)
    content.copy_(host)
    spans = [(1536 * n, 1281 + n % 256) for n in range(20_000)]
    assert digests(content, spans) == digests(host, spans)
    del content
    mapping.close()


@pytest.mark.parametrize("span", [(-1, 5), (0, MIB + 1), (MIB - 4, 5), (1 << 62, 1 << 62)])
def test_the_kernel_is_not_asked_for_what_lies_outside(
    memory: CudaMemory, span: tuple[int, int]
) -> None:
    content = torch.zeros(MIB, dtype=torch.uint8, device=memory.device)
    with pytest.raises(ValueError, match="a span"):
        digests(content, [(0, MIB), span])


def test_without_a_compiler_the_digest_is_the_same(
    memory: CudaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = torch.randint(0, 256, (MIB + 3,), dtype=torch.uint8).to(memory.device)
    whole = digest(data)

    def refuse(source: str, name: str, ordinal: int) -> int:
        raise WcacheError("there is no NVRTC on this machine")

    monkeypatch.setattr(driver, "compile_kernel", refuse)
    mix_kernel.compiled.cache_clear()
    try:
        assert mix_kernel.sums(data, torch.tensor([0]), torch.tensor([len(data)])) is None
        assert digest(data) == whole
    finally:
        mix_kernel.compiled.cache_clear()


def test_source_that_is_no_kernel_is_an_error(memory: CudaMemory) -> None:
    with pytest.raises(WcacheError, match="nvrtcCompileProgram"):
        driver.compile_kernel("no kernel", "mix64", 0)


def test_the_digest_needs_little_memory(memory: CudaMemory) -> None:
    data = torch.zeros(LARGE, dtype=torch.uint8, device=memory.device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    digest(data)
    assert torch.cuda.max_memory_allocated() - before <= 64 * MIB
