"""``wcache verify`` on a GPU: bits that are flipped where they lie, and a GPU with no room."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import damage
from tests.checkpoints import write_llama, write_qwen3
from tests.cli.snapshot import Done, wcache
from tests.damage import Damage
from tests.places import Places
from tests.processes import wait_for
from wcache.errors import ExitCode
from wcache.machine.devices import CONTEXT_BYTES, processes, visible_gpus
from wcache.memory import driver
from wcache.memory.slab import Access, Slab
from wcache.verify.held import held, memory_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.skipif(not driver.driver_available(), reason="no NVIDIA driver"),
]


class Gpu:
    """A rank of its own on the first GPU."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.model: Path = write_llama(places.root / "model")
        self.visible = {"CUDA_VISIBLE_DEVICES": visible_gpus()[0].uuid}

    def __call__(self, *arguments: str) -> Done:
        return wcache(self.places, *arguments, extra=self.visible)

    def hurt(self, change: Damage) -> list[str]:
        """Whoever has a GPU slab's descriptor can map it for writing: no copy is needed here."""
        with held(self.places.rank()) as one:
            manifest = one.manifest()
            slabs = [Slab(fd, info) for fd, info in zip(one.slab_fds, manifest.slabs, strict=True)]
            mapping = memory_of(manifest.slabs[0]).map(slabs, Access.WRITE)
            content = mapping.tensor()
            named = change(manifest, content)
            torch.cuda.synchronize()
            del content
            mapping.close()
        return named

    def up(self, model: Path, *arguments: str) -> None:
        done = self(
            "up", "--model", str(model), "--device", "cuda", "--slab-bytes", "2MiB", *arguments
        )
        assert done.code == 0, done.stderr


@pytest.fixture
def gpu(places: Places) -> Iterator[Gpu]:
    made = Gpu(places)
    made.up(made.model)
    yield made
    made("down", "--force")


@pytest.mark.parametrize(
    "change",
    [
        damage.one_bit,
        damage.two_signs,
        damage.swapped_tensors,
        damage.swapped_chunks,
        damage.zeros,
    ],
    ids=lambda change: change.__name__,
)
def test_damage_is_found_named_and_mended(gpu: Gpu, change: Damage) -> None:
    named = gpu.hurt(change)
    found = gpu("verify", "--parity")
    assert found.code == ExitCode.MISMATCH, found.stderr
    assert all(f"{name} bytes: cached" in found.stdout for name in named)
    mended = gpu("verify", "--repair")
    assert mended.code == 0, mended.stdout + mended.stderr
    whole = gpu("verify", "--parity")
    assert whole.code == 0, whole.stdout + whole.stderr


@pytest.mark.parametrize("on_disk", [False, True], ids=["on load", "on disk"])
def test_fp8_on_the_gpu_is_what_the_host_makes_and_computes(places: Places, on_disk: bool) -> None:
    """A fresh load is quantized on the host, and the bytes must be the same."""
    rank = Gpu(places)
    quantization = () if on_disk else ("--quantization", "fp8")
    try:
        rank.up(write_qwen3(places.root / "qwen3", fp8=on_disk), *quantization)
        done = rank("verify", "--parity", "--json")
        assert done.code == 0, done.stdout + done.stderr
        results = {one["check"]: one for one in json.loads(done.stdout)["results"]}
        assert results["parity"]["result"] == "ok"
        # Not bit for bit: the GPU's libraries choose their kernels in every run.
        assert results["logits"]["result"] in ("ok", "warning")
        assert "with FP8 multiplied out" in results["logits"]["detail"]
    finally:
        rank("down", "--force")


def test_a_gpu_without_room_for_a_context_is_told_with_numbers(gpu: Gpu) -> None:
    torch.zeros(1, device="cuda")
    uuid = visible_gpus()[0].uuid
    wait_for(lambda: len(processes(uuid)) == 1, "the loader's context is given back")
    room = visible_gpus()[0].free_bytes - CONTEXT_BYTES // 2
    filled = torch.empty(room, dtype=torch.uint8, device="cuda")
    try:
        done = gpu("verify")
        assert done.code == ExitCode.FAILED, done.stdout + done.stderr
        assert "too full" in done.stdout
        assert "640.0 MiB" in done.stdout
        assert "--quick" in done.stdout
        assert gpu("verify", "--quick").code == 0
    finally:
        del filled
        torch.cuda.empty_cache()
    assert gpu("verify").code == 0
