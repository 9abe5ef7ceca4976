"""``wcache verify`` against real ranks whose bytes were damaged, at every depth."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests import damage
from tests.checkpoints import llama_tensors, write_checkpoint, write_llama, write_qwen3
from tests.cli.snapshot import Done, environment, wcache
from tests.damage import Damage, publish_damaged
from tests.places import Places
from tests.processes import PATIENCE_S
from wcache.config import load_config
from wcache.errors import ExitCode, MismatchError
from wcache.manifest import Manifest
from wcache.paths import RankPaths
from wcache.protocol.control import Control
from wcache.protocol.messages import AskLoad, LoadOrder, NothingToLoad, Report
from wcache.ranks import ask
from wcache.verify import Depth, Result, Verification, Verifier
from wcache.verify.held import held

pytestmark = pytest.mark.process

_ENGINE = """
import sys, wcache
attachment = wcache.attach()
print("attached", flush=True)
sys.stdin.read()
"""


class Node:
    """Ranks of the test's own, and what verifying says of them."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.paths: RankPaths = places.rank()

    def __call__(self, *arguments: str) -> Done:
        return wcache(self.places, *arguments)

    def up(self, model: Path, *arguments: str) -> None:
        small = ("--device", "cpu", "--slab-bytes", "2MiB")
        done = self("up", "--model", str(model), *small, *arguments)
        assert done.code == 0, done.stderr

    def verify(self, depth: Depth) -> list[Result]:
        config = load_config(self.places.instance().config_file)
        verifier = Verifier(config)
        return list(verifier.verify(self.paths, depth=depth, progress=lambda *_: None))

    def report(self) -> Report:
        found = ask(self.paths)
        assert found is not None
        return found

    def slab_inodes(self) -> list[int]:
        with held(self.paths) as one:
            return [os.fstat(fd).st_ino for fd in one.slab_fds]

    @contextlib.contextmanager
    def engine(self) -> Iterator[int]:
        """A process that has the weights attached; gives its pid."""
        process = subprocess.Popen(
            [sys.executable, "-c", _ENGINE], env=environment(self.places),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "attached\n"
            yield process.pid
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_S)
            process.stdin.close()
            process.stdout.close()


@pytest.fixture
def node(places: Places) -> Iterator[Node]:
    made = Node(places)
    yield made
    made("down", "--force")


def one(results: list[Result], check: str) -> Result:
    (found,) = [result for result in results if result.check == check]
    return found


def code(results: list[Result]) -> ExitCode:
    return Verification(instance="", depth="digest", results=tuple(results)).exit_code


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
def test_damage_is_found_named_and_mended(node: Node, change: Damage) -> None:
    node.up(write_llama(node.places.root / "model"))
    named = publish_damaged(node.paths, change)
    assert code(node.verify("quick")) == 0

    found = one(node.verify("digest"), "digests")
    assert found.result == "bad"
    assert found.detail.count("storage") == len(named)
    assert all(name in found.detail for name in named)

    differences = [
        difference
        for result in node.verify("parity")
        for difference in result.differences
        if result.result == "bad"
    ]
    assert {(d.tensor, d.field) for d in differences} == {(name, "bytes") for name in named}

    mended = node.verify("repair")
    assert (one(mended, "digests").result, one(mended, "repair").result) == ("warning", "ok")
    assert all(name in one(mended, "repair").detail for name in named)
    assert code(mended) == 0
    assert code(node.verify("parity")) == 0


def test_parity_says_what_it_compared(node: Node) -> None:
    node.up(write_llama(node.places.root / "model"))
    done = node("verify", "--parity", "--json")
    assert done.code == 0, done.stdout + done.stderr
    results = {one["check"]: one for one in json.loads(done.stdout)["results"]}
    assert results["parity"]["result"] == results["logits"]["result"] == "ok"
    assert "21 tensors" in results["parity"]["detail"]
    assert "bit for bit" in results["logits"]["detail"]


def test_logits_of_damaged_weights_are_told_with_their_distance(node: Node) -> None:
    node.up(write_llama(node.places.root / "model"))
    publish_damaged(node.paths, damage.embedding)
    found = one(node.verify("parity"), "logits")
    assert found.result == "bad"
    assert "up to" in found.detail


def test_shards_are_compared_and_their_logits_are_not_claimed(node: Node) -> None:
    node.up(write_llama(node.places.root / "model"), "--tp", "3")
    done = node("verify", "--parity", "1", "--json")
    assert done.code == 0, done.stdout + done.stderr
    results = {one["check"]: one for one in json.loads(done.stdout)["results"]}
    assert results["parity"]["result"] == "ok"
    assert results["logits"]["result"] == "skipped"
    assert "tp_size 3" in results["logits"]["detail"]


def test_converted_weights_are_what_a_fresh_load_converts(node: Node) -> None:
    node.up(write_llama(node.places.root / "model"), "--dtype", "float32")
    results = node.verify("parity")
    assert one(results, "parity").result == "ok"
    assert one(results, "logits").result == "ok"


@pytest.mark.parametrize("on_disk", [False, True], ids=["on load", "on disk"])
def test_fp8_weights_compute_what_transformers_makes_of_them(node: Node, on_disk: bool) -> None:
    pytest.importorskip("accelerate")  # transformers loads FP8 checkpoints with it
    quantization = () if on_disk else ("--quantization", "fp8")
    node.up(write_qwen3(node.places.root / "model", fp8=on_disk), *quantization)
    found = one(node.verify("parity"), "logits")
    assert found.result == "ok"
    assert "with FP8 multiplied out, are those of" in found.detail

    def change(manifest: Manifest, content: torch.Tensor) -> list[str]:
        name = "model.layers.1.mlp.down_proj.weight_scale_inv"
        damage.storage(manifest, content, name)[3] ^= 0x40  # an exponent
        return [name]

    publish_damaged(node.paths, change)
    assert one(node.verify("parity"), "logits").result == "bad"


@pytest.mark.parametrize("on_disk", [False, True], ids=["on load", "on disk"])
def test_fp8_weights_and_their_scales_are_compared_and_mended(node: Node, on_disk: bool) -> None:
    quantization = () if on_disk else ("--quantization", "fp8")
    node.up(write_qwen3(node.places.root / "model", fp8=on_disk), "--tp", "2", *quantization)
    weight = "model.layers.1.mlp.down_proj.weight"
    assert one(node.verify("parity"), "parity").result == "ok"

    def change(manifest: Manifest, content: torch.Tensor) -> list[str]:
        """A scale alone: it can be had again only together with its weight."""
        damage.storage(manifest, content, f"{weight}_scale_inv")[3] ^= 0x80
        return [f"{weight}_scale_inv"]

    publish_damaged(node.paths, change)
    found = [d for r in node.verify("parity") for d in r.differences]
    assert [(d.tensor, d.field) for d in found] == [(f"{weight}_scale_inv", "bytes")]
    assert one(node.verify("repair"), "repair").result == "ok"
    results = node.verify("parity")
    assert one(results, "parity").result == "ok"
    assert one(results, "logits").result == "skipped"


def test_weights_that_an_engine_published_have_nothing_to_be_compared_with(node: Node) -> None:
    import wcache as library

    node.up(Path("test-model"), "--loader", "publish")
    library.publish(torch.nn.Linear(4, 4))
    done = node("verify", "--parity")
    assert done.code == ExitCode.FAILED
    assert "an engine published these weights" in done.stdout

    def change(manifest: Manifest, content: torch.Tensor) -> list[str]:
        content[5] ^= 1
        return ["weight"]

    publish_damaged(node.paths, change)
    before = node.report()
    done = node("verify", "--repair")
    assert done.code == ExitCode.MISMATCH
    assert "can not be read again" in done.stdout
    assert node.report().generations == before.generations


def crossing(root: Path) -> Path:
    """Five storages of 1.5 MiB: in slabs of 2 MiB, three of them cross from one to the next."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"layer.{index}.weight": torch.randn(768, 1024, generator=generator).bfloat16()
        for index in range(5)
    }
    return write_checkpoint(root / "model", tensors)


def test_repair_makes_only_the_slabs_with_damage_anew(node: Node) -> None:
    node.up(crossing(node.places.root))
    before = node.slab_inodes()

    def change(manifest: Manifest, content: torch.Tensor) -> list[str]:
        damage.storage(manifest, content, "layer.1.weight")[[0, -1]] ^= 1
        damage.storage(manifest, content, "layer.4.weight")[-1] ^= 1
        return ["layer.1.weight", "layer.4.weight"]

    publish_damaged(node.paths, change)
    damaged = node.slab_inodes()
    assert len(damaged) == 4
    assert set(damaged).isdisjoint(before)
    assert one(node.verify("repair"), "repair").result == "ok"
    # Storage 1 lies in slabs 0 and 1, storage 4 in slab 3.
    mended = node.slab_inodes()
    assert [new == old for new, old in zip(mended, damaged, strict=True)] == [
        False, False, True, False,
    ]  # fmt: skip
    assert one(node.verify("parity"), "parity").result == "ok"
    report = node.report()
    assert [held.serving for held in report.generations] == [True]
    assert report.problems == ()


def test_repair_names_the_engines_that_hold_damaged_bytes(node: Node) -> None:
    node.up(write_llama(node.places.root / "model"))
    publish_damaged(node.paths, damage.zeros)
    with node.engine() as pid:
        mended = node.verify("repair")
        lines = [r.detail for r in mended if (r.check, r.result) == ("repair", "warning")]
        assert len(lines) == 1
        assert f"pid {pid}" in lines[0]
        assert code(mended) == 0
        assert len(node.report().generations) == 2
        again = node.verify("repair")
        assert [r.result for r in again if r.check == "repair"] == ["ok"]


def test_bytes_on_disk_that_are_not_the_digests_are_never_published(node: Node) -> None:
    """A change that no sample of the checkpoint's identity shows, and no time of the file."""
    folder = crossing(node.places.root)
    node.up(folder)

    def change(manifest: Manifest, content: torch.Tensor) -> list[str]:
        damage.storage(manifest, content, "layer.2.weight")[0] ^= 1
        return ["layer.2.weight"]

    publish_damaged(node.paths, change)
    file = folder / "model.safetensors"
    status = file.stat()
    with file.open("r+b") as opened:
        header = int.from_bytes(opened.read(8), "little")
        opened.seek(8 + header + 2 * 768 * 1024 * 2 + 64)
        opened.write(b"other")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    served = node.report().serving
    results = node.verify("repair")
    assert one(results, "checkpoint").result == "ok"
    assert one(results, "repair").result == "bad"
    assert "layer.2.weight" in one(results, "repair").detail
    assert "not published" in one(results, "repair").detail
    assert code(results) == ExitCode.MISMATCH
    report = node.report()
    assert report.serving == served
    assert "has not its digest" in report.problems[0]


def test_a_checkpoint_that_changed_is_not_mixed_into_what_is_served(node: Node) -> None:
    folder = write_llama(node.places.root / "model")
    node.up(folder)
    publish_damaged(node.paths, damage.one_bit)
    write_llama(folder, num_hidden_layers=1)
    results = node.verify("repair")
    assert "is not what was loaded any more" in one(results, "repair").detail
    assert code(results) == ExitCode.MISMATCH
    parity = one(node.verify("digest"), "checkpoint")
    assert parity.result == "bad"


def test_parity_without_the_files_is_no_success(node: Node) -> None:
    folder = write_llama(node.places.root / "model")
    node.up(folder)
    folder.rename(node.places.root / "elsewhere")
    results = node.verify("parity")
    assert one(results, "digests").result == "ok"
    assert one(results, "parity").result == one(results, "logits").result == "skipped"
    assert code(results) == ExitCode.FAILED


def test_a_model_that_transformers_can_not_make_costs_the_logits_alone(node: Node) -> None:
    folder = write_llama(node.places.root / "model")
    node.up(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_act": "nonsense"}))
    results = node.verify("parity")
    assert one(results, "parity").result == "ok"
    found = one(results, "logits")
    assert found.result == "skipped"
    assert found.detail.startswith("transformers can not run this model: KeyError: 'nonsense'")


def test_a_model_that_writes_to_its_weights_is_no_skip(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU tells of a store into what is mapped for reading."""
    node.up(write_llama(node.places.root / "model"))

    def run(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr("wcache.verify.logits._run", run)
    found = one(node.verify("parity"), "logits")
    assert (found.result, found.detail) == (
        "bad",
        "a model of transformers ends on them: CUDA error: an illegal memory access was"
        " encountered",
    )


def test_a_checkpoint_of_other_content_is_told_tensor_by_tensor(node: Node) -> None:
    folder = write_llama(node.places.root / "model")
    node.up(folder)
    tensors = llama_tensors()
    tensors["model.norm.weight"][3] += 1
    del tensors["model.layers.1.input_layernorm.weight"]
    write_checkpoint(folder, tensors)
    found = [d for r in node.verify("parity") for d in r.differences]
    assert {(d.tensor, d.field) for d in found} == {
        ("model.norm.weight", "bytes"),
        ("model.layers.1.input_layernorm.weight", "name"),
    }


def test_weights_that_are_not_the_wanted_ones_are_loaded_and_not_repaired(node: Node) -> None:
    node.up(write_llama(node.places.root / "model"))
    config = load_config(node.places.instance().config_file)
    other = msgspec.structs.replace(config.model, dtype="float16")
    node.places.write_config(msgspec.structs.replace(config, model=other))
    before = node.report().generations
    with Control.connect(node.paths, "loader") as control:
        with pytest.raises(MismatchError, match="does not hold the weights"):
            control.request(AskLoad(repair=True), LoadOrder)
    assert node.report().generations == before


def test_a_rank_that_serves_is_loaded_again_for_a_repair_alone(node: Node) -> None:
    node.up(write_llama(node.places.root / "model"))
    with Control.connect(node.paths, "loader") as control:
        answer = control.request(AskLoad(), NothingToLoad)
        assert "holds generation 1 already" in answer.message
        assert control.request(AskLoad(repair=True), LoadOrder).generation == 2
    # The peer is gone, and with it its load: what is served is as it was.
    serving = node.report().serving
    assert serving is not None
    assert serving.number == 1


def test_two_depths_at_once_are_refused(node: Node) -> None:
    done = node("verify", "--quick", "--repair")
    assert done.code == ExitCode.USAGE
    assert "choose one" in done.stderr
