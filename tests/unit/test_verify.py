"""What verifying says of differences, of what it could not look at, and with which exit code."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tests.checkpoints import write_llama
from tests.loading import Daemon
from wcache.config import Config, MemorySection, ModelSection
from wcache.daemon.generation import Generation
from wcache.errors import CheckpointError, ExitCode, OutOfMemoryError
from wcache.load import job
from wcache.machine import devices
from wcache.manifest import Manifest, SlabInfo, Storage
from wcache.memory import driver
from wcache.paths import RankId
from wcache.protocol.messages import Attached, LoadOrder
from wcache.verify import Result, Verification, digests
from wcache.verify.fresh import Fresh
from wcache.verify.held import Held, check_context, gpu_room, mapped
from wcache.verify.parity import compare, parity
from wcache.verify.quick import Files
from wcache.verify.result import MAX_NAMES, TensorDifference, some

pytestmark = pytest.mark.unit

UUID = "GPU-00000000-0000-0000-0000-000000000000"
NORM = "model.norm.weight"


class Loaded:
    """A tiny Llama as the loader has it in the host's memory, and the same on disk."""

    def __init__(self, folder: Path, **model: Any) -> None:
        self.folder = write_llama(folder)
        self.config = Config(
            model=ModelSection(path=str(self.folder), **model),
            memory=MemorySection(slab_bytes=2 << 20),
        )
        with Daemon(self.config) as daemon:
            order = LoadOrder(generation=1, config=self.config)
            job.load(daemon, order, RankId("", 0))
            held = self._held(daemon.generation)
            self.manifest = held.manifest()
            with mapped(held) as content:
                self.content = content.clone()

    @staticmethod
    def _held(generation: Generation) -> Held:
        attached = Attached(
            generation=1, manifest_digest=generation.manifest_digest, slabs=generation.slabs
        )
        return Held(attached, generation.manifest_fd, generation.slab_fds)

    def compare(self, manifest: Manifest | None = None) -> list[TensorDifference]:
        fresh = Fresh.of(self.folder, self.config, 0)
        found = compare(manifest or self.manifest, self.content, fresh, lambda *_: None)
        return list(found)

    def parity(self, manifest: Manifest | None = None) -> list[Result]:
        found = parity(
            0, manifest or self.manifest, self.content, self.config, self.folder, lambda *_: None
        )
        return list(found)

    def changed(self, which: str, /, **fields: Any) -> Manifest:
        """The manifest with other ``fields`` of one tensor."""
        return msgspec.structs.replace(
            self.manifest,
            tensors=tuple(
                msgspec.structs.replace(tensor, **fields) if tensor.name == which else tensor
                for tensor in self.manifest.tensors
            ),
        )


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    return Loaded(tmp_path / "model")


def test_a_loaded_rank_is_as_a_fresh_load(loaded: Loaded) -> None:
    assert loaded.compare() == []
    (result,) = loaded.parity()
    assert (result.result, result.differences) == ("ok", ())


@pytest.mark.parametrize(
    ("field", "cached", "told"),
    [
        ("dtype", "F16", ("F16", "BF16")),
        ("shape", (6, 8), ("[6, 8]", "[48]")),
        ("stride", (2,), ("[2]", "[1]")),
        ("storage_offset", 3, ("3", "0")),
        ("kind", "buffer", ("buffer", "parameter")),
        ("persistent", False, ("False", "True")),
        ("tied_to", "lm_head.weight", ("lm_head.weight", "none")),
    ],
)
def test_every_field_of_a_tensor_is_compared(
    loaded: Loaded, field: str, cached: object, told: tuple[str, str]
) -> None:
    (found,) = loaded.compare(loaded.changed(NORM, **{field: cached}))
    assert (found.tensor, found.field) == (NORM, field)
    assert (found.cached, found.fresh) == told
    assert str(found) == f"{NORM} {field}: cached {told[0]}, fresh {told[1]}"


def test_a_broken_tie_is_told(loaded: Loaded) -> None:
    (found,) = loaded.compare(loaded.changed("lm_head.weight", tied_to=None))
    assert (found.tensor, found.field) == ("lm_head.weight", "tied_to")
    assert (found.cached, found.fresh) == ("none", "model.embed_tokens.weight")


def test_tensors_of_one_side_only_are_told(loaded: Loaded) -> None:
    found = loaded.compare(loaded.changed(NORM, name="model.other.weight"))
    assert {(d.tensor, d.cached, d.fresh) for d in found} == {
        ("model.other.weight", "there", "absent"),
        (NORM, "absent", "there"),
    }
    assert {d.field for d in found} == {"name"}


def test_extras_that_no_load_makes_are_told(loaded: Loaded) -> None:
    (found,) = loaded.compare(msgspec.structs.replace(loaded.manifest, extras={"model.flag": 3}))
    assert str(found) == "model.flag extra: cached 3, fresh absent"


def test_other_bytes_are_told_with_their_place_and_number(loaded: Loaded) -> None:
    number = next(t.storage for t in loaded.manifest.tensors if t.name == NORM)
    run = loaded.manifest.storages[number]
    before = bytes(loaded.content[run.offset + 8 : run.offset + 16].tolist())
    loaded.content[[run.offset + 13, run.offset + 90]] ^= 0x80
    after = bytes(loaded.content[run.offset + 8 : run.offset + 16].tolist())
    (found,) = loaded.compare()
    assert (found.tensor, found.field) == (NORM, "bytes")
    assert found.cached == after.hex()
    assert found.fresh == f"{before.hex()} at byte 8; 2 of 96 differ"


def test_storages_of_another_size_are_told(loaded: Loaded) -> None:
    number = next(t.storage for t in loaded.manifest.tensors if t.name == NORM)
    storages = list(loaded.manifest.storages)
    storages[number] = Storage(storages[number].offset, 94, storages[number].digest)
    (found,) = loaded.compare(msgspec.structs.replace(loaded.manifest, storages=tuple(storages)))
    assert (found.field, found.cached, found.fresh) == ("nbytes", "94", "96")


def test_differences_after_the_twentieth_are_counted_and_kept(loaded: Loaded) -> None:
    loaded.content.zero_()
    results = loaded.parity(loaded.changed(NORM, shape=(6, 8), stride=(8, 1)))
    assert {result.result for result in results} == {"bad"}
    differences = [d for result in results for d in result.differences]
    assert len(differences) == 20 + 2
    assert results[-1].detail == "2 more differences"


def test_storages_are_read_in_batches_of_bounded_size(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wcache.verify import fresh as module

    monkeypatch.setattr(module, "_BATCH_BYTES", 10_000)
    assert loaded.compare() == []
    plans = list(module._batches(Fresh.of(loaded.folder, loaded.config, 0).plan.stored))
    assert len(plans) > 3
    assert all(plan.total_bytes <= 10_000 or len(plan.targets) == 1 for plan in plans)


def test_only_what_is_wanted_is_read(loaded: Loaded) -> None:
    fresh = Fresh.of(loaded.folder, loaded.config, 0)
    read: list[int] = []
    (found,) = [(name, data.clone()) for name, data in fresh.read({NORM}, read.append)]
    assert found[0] == NORM
    assert read[-1] == 96
    assert list(fresh.read(set(), read.append)) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _: None, "can not be read"),
        (lambda c: _with(c, dtype="float16"), "asks for other weights (dtype)"),
    ],
    ids=["no configuration", "another dtype"],
)
def test_parity_without_a_fresh_load_says_why(
    loaded: Loaded, change: Callable[[Config], Config | None], reason: str
) -> None:
    (result,) = parity(
        0, loaded.manifest, loaded.content, change(loaded.config), loaded.folder, lambda *_: None
    )
    assert result.result == "skipped"
    assert reason in result.detail


def _with(config: Config, **model: Any) -> Config:
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **model))


def test_damage_is_found_in_batches_too(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_BATCH_BYTES", 5000)
    seen: list[tuple[str, int, int]] = []

    def progress(phase: str, done: int, total: int) -> None:
        seen.append((phase, done, total))

    assert digests.damaged(loaded.manifest, loaded.content, progress) == []
    total = loaded.manifest.weight_bytes
    assert seen[0] == ("digest", 0, total)
    assert seen[-1] == ("digest", total, total)
    assert len(seen) > 3
    last = loaded.manifest.storages[-1]
    loaded.content[last.offset] ^= 1
    bad = digests.damaged(loaded.manifest, loaded.content, progress)
    assert bad == [len(loaded.manifest.storages) - 1]


# --- a GPU that is too full -------------------------------------------------------------------


def _gpu(monkeypatch: pytest.MonkeyPatch, free_bytes: int, *, has_context: bool = False) -> None:
    monkeypatch.setattr(driver, "device_ordinals", lambda: {UUID: 0})
    monkeypatch.setattr(driver, "has_context", lambda _: has_context)
    monkeypatch.setattr(devices, "gpu", lambda _: SimpleNamespace(free_bytes=free_bytes))


SLAB = SlabInfo(kind="cuda", nbytes=2 << 20, device_uuid=UUID)


def test_a_gpu_without_room_for_a_context_is_told_with_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _gpu(monkeypatch, 100 << 20)
    with pytest.raises(OutOfMemoryError) as refused:
        check_context(SLAB)
    assert "640.0 MiB" in refused.value.message
    assert "100.0 MiB is free" in refused.value.message
    assert "--quick" in refused.value.hint


def test_a_gpu_with_room_or_with_a_context_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpu(monkeypatch, 2 << 30)
    check_context(SLAB)
    _gpu(monkeypatch, 0, has_context=True)
    check_context(SLAB)
    _gpu(monkeypatch, 0)
    check_context(SlabInfo(kind="host", nbytes=2 << 20))


def test_memory_that_torch_does_not_get_is_an_operators_error() -> None:
    with pytest.raises(OutOfMemoryError, match="too full: cuda out of memory"), gpu_room():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


# --- exit codes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([("digests", "ok"), ("checkpoint", "warning")], ExitCode.DONE),
        ([("digests", "skipped"), ("parity", "bad")], ExitCode.MISMATCH),
        ([("weights", "skipped"), ("digests", "ok")], ExitCode.NOT_READY),
        ([("digests", "skipped")], ExitCode.FAILED),
        ([("digests", "ok"), ("parity", "skipped")], ExitCode.FAILED),
        ([("parity", "ok"), ("logits", "skipped")], ExitCode.DONE),
        ([("digests", "warning"), ("repair", "ok"), ("repair", "warning")], ExitCode.DONE),
    ],
)
def test_exit_code(outcomes: list[Any], code: ExitCode) -> None:
    results = tuple(
        Result(rank=0, check=check, result=result, detail="") for check, result in outcomes
    )
    assert Verification(instance="", depth="digest", results=results).exit_code == code


def test_many_names_are_cut() -> None:
    names = [f"t{index}" for index in range(MAX_NAMES + 2)]
    assert some(names).endswith("t4 and 2 more")
    assert some([]) == "no tensor"


def test_files_that_this_user_can_not_read_are_no_damage(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nobody would see it: root reads every file."""

    def denied(folder: Path) -> None:
        raise CheckpointError(f"{folder} can not be read: permission denied")

    monkeypatch.setattr("wcache.verify.quick.open_checkpoint", denied)
    monkeypatch.setattr("os.access", lambda *_: False)
    found = Files(loaded.config).check(0, loaded.manifest)
    assert (found.result, found.detail) == (
        "skipped", f"{loaded.folder} can not be read by this user"
    )  # fmt: skip
