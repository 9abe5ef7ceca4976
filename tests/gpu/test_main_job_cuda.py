"""The main job on a GPU: up, attach, a faulting engine, kill -9, verify, down."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import write_llama
from tests.cli.snapshot import Done, environment, wcache
from tests.places import Places
from tests.processes import wait_for
from wcache.machine.devices import processes, visible_gpus
from wcache.memory import driver
from wcache.protocol.messages import Report
from wcache.ranks import ask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.skipif(not driver.driver_available(), reason="no NVIDIA driver"),
]

# The attached engine prints a sum of all its bytes whenever it is asked.
_ENGINE = """
import sys, torch, wcache
attachment = wcache.attach()
for line in sys.stdin:
    total = sum(int(t.view(torch.uint8).long().sum()) for t in attachment.tensors.values())
    print(total, attachment.lease_state, flush=True)
"""
_STORE = """
import torch, wcache
tensor = next(iter(wcache.attach().tensors.values()))
tensor.zero_()
torch.cuda.synchronize()
"""


class Gpu:
    """A rank of its own on the first GPU."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.model: Path = write_llama(places.root / "model")
        self.before = used()
        # The suite's environment shows no GPU to anybody; by UUID, as an operator would choose.
        self.visible = {"CUDA_VISIBLE_DEVICES": visible_gpus()[0].uuid}

    def __call__(self, *arguments: str) -> Done:
        return wcache(self.places, *arguments, extra=self.visible)

    def up(self) -> None:
        done = self("up", "--model", str(self.model), "--device", "cuda", "--slab-bytes", "2MiB")
        assert done.code == 0, done.stderr

    def report(self) -> Report:
        found = ask(self.places.rank())
        assert found is not None
        return found

    def python(self, program: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", program], env=environment(self.places, self.visible), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip


def used() -> int:
    first = visible_gpus()[0]
    return first.total_bytes - first.free_bytes


@pytest.fixture
def gpu(places: Places) -> Iterator[Gpu]:
    made = Gpu(places)
    yield made
    made("down", "--force")


def test_weights_survive_on_the_gpu_and_are_freed_by_down(gpu: Gpu) -> None:
    gpu.up()
    first = gpu.report()
    assert first.serving is not None
    assert first.serving.fingerprint.device_uuid == visible_gpus()[0].uuid
    engine = gpu.python(_ENGINE)
    try:
        before = said(engine)
        os.kill(first.pid, signal.SIGKILL)
        wait_for(lambda: (now := ask(gpu.places.rank())) is not None and now.pid != first.pid,
                 "a new daemon")  # fmt: skip
        after = gpu.report()
        assert after.serving is not None
        assert after.serving.how == "adopted"
        assert after.serving.manifest_digest == first.serving.manifest_digest
        wait_for(lambda: len(gpu.report().leases) == 1, "the engine renews its lease")
        assert said(engine) == before
        status = json.loads(gpu("status", "--json").stdout)
        assert [lease["pid"] for lease in status["leases"]] == [engine.pid]
    finally:
        engine.kill()
        engine.communicate()
    assert gpu("verify").code == 0
    # Held by descriptors, and so by nobody whom the driver could name.
    uuid = visible_gpus()[0].uuid
    wait_for(lambda: not processes(uuid), "engine and verify are gone")
    assert used() > gpu.before
    assert gpu("down").code == 0
    wait_for(lambda: used() <= gpu.before, "the GPU's memory is given back")


def test_a_store_into_the_map_ends_the_engine_that_did_it_alone(gpu: Gpu) -> None:
    gpu.up()
    good = gpu.python(_ENGINE)
    bad = gpu.python(_STORE)
    try:
        before = said(good)
        _, stderr = bad.communicate(timeout=60)
        assert bad.returncode != 0
        assert "illegal memory access" in stderr
        assert said(good) == before
        assert gpu("verify").code == 0
    finally:
        for engine in (good, bad):
            engine.kill()
            engine.communicate()


def test_a_live_engine_gives_back_what_down_gave_up(gpu: Gpu) -> None:
    gpu.up()
    first = gpu.report().serving
    assert first is not None
    engine = gpu.python(_ENGINE)
    try:
        before = said(engine)
        assert gpu("down", "--force").code == 0
        gpu.model.rename(gpu.places.root / "away")
        done = gpu("up")
        assert done.code == 0, done.stderr
        second = gpu.report().serving
        assert second is not None
        assert (second.how, second.manifest_digest) == ("reclaimed", first.manifest_digest)
        wait_for(lambda: len(gpu.report().leases) == 1, "the engine renews its lease")
        assert said(engine) == before
    finally:
        engine.kill()
        engine.communicate()
    # Nobody but the supervisor and the daemon has it now.
    assert gpu("verify").code == 0
    assert gpu("down").code == 0
    wait_for(lambda: used() <= gpu.before, "the GPU's memory is given back")


def said(engine: "subprocess.Popen[str]") -> str:
    """The engine's sum; that its lease is held is checked elsewhere, for it may be renewing."""
    assert engine.stdin is not None
    assert engine.stdout is not None
    engine.stdin.write("sum\n")
    engine.stdin.flush()
    return engine.stdout.readline().split()[0]
