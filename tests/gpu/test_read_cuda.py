"""What is read into a GPU is what is read into the host: runs, rows, conversions, cold files."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.checkpoints import write_checkpoint, write_llama
from tests.loading import EMBEDDING, LLAMA
from tests.reading import Elsewhere, many
from wcache.checkpoint import Checkpoint, open_checkpoint
from wcache.layout import Layout
from wcache.load.placement import place
from wcache.load.plan import Plan
from wcache.load.read import read_plan
from wcache.load.reading.files import SourceFile
from wcache.memory import driver
from wcache.memory.cuda import CudaMapping, CudaMemory
from wcache.memory.slab import Access

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not driver.driver_available(), reason="no NVIDIA driver"),
]

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@contextmanager
def mapped(nbytes: int, uuid: str | None = None) -> Iterator[CudaMapping]:
    memory = CudaMemory(uuid or next(iter(driver.device_ordinals())))
    slab = memory.create(-(-nbytes // memory.granularity) * memory.granularity)
    mapping = memory.map([slab], Access.WRITE)
    slab.close()
    yield mapping
    mapping.close()


def same_on_both(checkpoint: Checkpoint, planned: Plan, chunk_bytes: int) -> bool:
    host = Elsewhere(planned.total_bytes)
    read_plan(checkpoint, planned, host, lambda _: None, chunk_bytes=chunk_bytes)
    with mapped(planned.total_bytes) as mapping:
        content = mapping.tensor()
        content.zero_()
        torch.cuda.synchronize()  # readers have streams of their own
        seen: list[int] = []
        read_plan(checkpoint, planned, mapping, seen.append, chunk_bytes=chunk_bytes)
        assert seen[-1] == planned.weight_bytes
        return content[: planned.total_bytes].cpu().equal(host.content)


@pytest.mark.parametrize("chunk_bytes", [64, 4096, 16 * MIB])
@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("dtype", [None, "F16", "F32"])
def test_the_gpu_gets_what_the_host_gets(
    tmp_path: Path, chunk_bytes: int, tp: int, dtype: str | None
) -> None:
    checkpoint = open_checkpoint(write_llama(tmp_path / "m"))
    planned = place(
        checkpoint, Layout(tp=tp), tp - 1, dtype=dtype, tied=EMBEDDING,
        parallel=LLAMA if tp > 1 else None,
    )  # fmt: skip
    assert same_on_both(checkpoint, planned, chunk_bytes)


@pytest.mark.parametrize("cold", [True, False])
def test_slots_are_not_filled_again_before_they_were_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: bool
) -> None:
    """Many more pieces than slots, whose copies are still on their way when the next come."""
    if cold:
        monkeypatch.setattr(SourceFile, "is_cold", lambda self, *_: self._direct >= 0)
    generator = torch.Generator().manual_seed(3)
    tensors = {f"t{n}": torch.randn(4 * MIB + n, generator=generator) for n in range(8)}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", tensors, shards=2))
    assert same_on_both(checkpoint, place(checkpoint, Layout(), 0), 1 * MIB)
    assert same_on_both(checkpoint, place(checkpoint, Layout(), 0, dtype="BF16"), 1 * MIB)


def test_a_read_that_fails_leaves_no_thread_and_a_gpu_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", many(), shards=3))
    planned = place(checkpoint, Layout(), 0)

    def gone(done: int) -> None:
        raise BrokenPipeError

    with mapped(planned.total_bytes) as mapping:
        with pytest.raises(BrokenPipeError):
            read_plan(checkpoint, planned, mapping, gone, chunk_bytes=4096)
        assert not [one for one in threading.enumerate() if one.name.startswith("wcache-read")]
    assert same_on_both(checkpoint, planned, 4096)


_READ = """
import sys
from pathlib import Path
from tests.gpu.test_read_cuda import mapped
from wcache.checkpoint import open_checkpoint
from wcache.layout import Layout
from wcache.load.placement import place
from wcache.load.read import read_plan
from wcache.memory import driver

uuid, ordinal = list(driver.device_ordinals().items())[-1]
checkpoint = open_checkpoint(Path(sys.argv[1]))
for dtype in (None, "F32"):
    planned = place(checkpoint, Layout(), 0, dtype=dtype)
    with mapped(planned.total_bytes, uuid) as mapping:
        read_plan(checkpoint, planned, mapping, lambda _: None, chunk_bytes=4096)
print([driver.has_context(one) for one in (0, ordinal)])
"""


@pytest.mark.skipif(
    driver.driver_available() and len(driver.device_ordinals()) < 2, reason="one GPU is visible"
)
def test_who_reads_for_one_gpu_takes_no_memory_of_another(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m", many(), shards=3)
    done = subprocess.run(
        [sys.executable, "-c", _READ, str(model)],
        capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert done.stdout.strip() == "[False, True]", done.stdout + done.stderr


def test_sysfs_knows_the_gpu_by_its_address() -> None:
    """Not in every container: but where the folder of PCI devices is, the GPU is in it."""
    devices = Path("/sys/bus/pci/devices")
    address = driver.pci_address(0)
    assert len(address.split(":")) == 3
    if devices.is_dir() and any(devices.iterdir()):
        assert (devices / address).exists()
