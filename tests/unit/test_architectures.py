"""transformers is asked once about an architecture, and again when anything that counts changed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import llama_config, llama_tensors, write_checkpoint, write_llama
from tests.checkpoints import write_qwen3 as write_quantizable
from wcache.checkpoint import Checkpoint, open_checkpoint
from wcache.config import Config, LayoutSection, ModelSection
from wcache.errors import CheckpointError
from wcache.load import architectures as module
from wcache.load.architectures import Architectures, NotAskedError
from wcache.load.linears import fp8_layers
from wcache.load.parallel import read_parallel_plan
from wcache.load.placement import plan

pytest.importorskip("transformers")
pytestmark = pytest.mark.unit


class Asked:
    """How many times transformers was asked, through a cache in ``folder``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.times = 0
        for ask in (read_parallel_plan, fp8_layers):
            monkeypatch.setattr(module, ask.__name__, self._counting(ask))
        monkeypatch.setattr(module, "released", lambda: "5.0.0")

    def _counting(self, ask: Any) -> Any:
        def asking(checkpoint: Checkpoint) -> Any:
            self.times += 1
            return ask(checkpoint)

        return asking

    def plan(self, path: Path, *, keep: bool = True) -> Any:
        return Architectures(self.folder, keep).parallel_plan(open_checkpoint(path))


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(tmp_path / "state" / "architecture", monkeypatch)


def test_what_was_told_is_not_asked_again(asked: Asked, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m")
    first = asked.plan(path)
    assert asked.plan(path) == first == read_parallel_plan(open_checkpoint(path))
    assert asked.times == 1


@pytest.mark.parametrize("version", ["5.0.0", None])
def test_what_can_not_be_kept_is_asked_once_for_all_ranks(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    monkeypatch.setattr(module, "released", lambda: version)
    asked.folder.mkdir(parents=True)
    asked.folder.chmod(0o777)
    checkpoint = open_checkpoint(write_llama(tmp_path / "m"))
    told: list[str] = []
    architectures = Architectures(asked.folder, tell=told.append)
    plans = [architectures.parallel_plan(checkpoint) for _ in range(3)]
    assert (plans, asked.times) == ([read_parallel_plan(checkpoint)] * 3, 1)
    assert told == ["LlamaForCausalLM: asking transformers how it is spread over ranks"]
    other = open_checkpoint(
        write_checkpoint(tmp_path / "o", llama_tensors(), llama_config(num_attention_heads=12))
    )
    assert architectures.parallel_plan(other).attention_heads == (12,)


def test_layers_to_quantize_are_not_asked_again(asked: Asked, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_quantizable(tmp_path / "m"))
    cache = Architectures(asked.folder)
    first = cache.fp8_layers(checkpoint)
    assert cache.fp8_layers(checkpoint) == first == fp8_layers(checkpoint)
    assert first.linears
    assert asked.times == 1
    cache.parallel_plan(checkpoint)
    assert asked.times == 2


def test_a_person_is_told_before_the_seconds_that_it_takes(asked: Asked, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_llama(tmp_path / "m"))
    told: list[str] = []
    for _ in range(2):
        Architectures(asked.folder, tell=told.append).parallel_plan(checkpoint)
    assert told == ["LlamaForCausalLM: asking transformers how it is spread over ranks"]


def test_weights_elsewhere_with_the_same_configuration_are_not_asked_for(
    asked: Asked, tmp_path: Path
) -> None:
    asked.plan(write_llama(tmp_path / "m"))
    asked.plan(write_checkpoint(tmp_path / "other", llama_tensors(seed=3)))
    assert asked.times == 1


def test_another_configuration_is_asked_for(asked: Asked, tmp_path: Path) -> None:
    asked.plan(write_llama(tmp_path / "m"))
    config = llama_config(num_attention_heads=12)
    found = asked.plan(write_checkpoint(tmp_path / "other", llama_tensors(), config))
    assert found.attention_heads == (12,)
    assert asked.times == 2


def test_another_version_is_asked(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_llama(tmp_path / "m")
    asked.plan(path)
    monkeypatch.setattr(module, "released", lambda: "5.0.1")
    asked.plan(path)
    assert asked.times == 2


def test_another_scheme_is_asked_for(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_llama(tmp_path / "m")
    asked.plan(path)
    monkeypatch.setattr(module, "SCHEME", module.SCHEME + 1)
    asked.plan(path)
    assert asked.times == 2


def test_what_a_working_copy_says_is_not_kept(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "released", lambda: None)
    path = write_llama(tmp_path / "m")
    asked.plan(path)
    asked.plan(path)
    assert asked.times == 2
    assert not asked.folder.exists()


def test_who_may_not_ask_is_told_what_is_kept(asked: Asked, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_llama(tmp_path / "m"))
    told: list[str] = []
    kept = Architectures(asked.folder, asks=False, tell=told.append)
    with pytest.raises(NotAskedError):
        kept.parallel_plan(checkpoint)
    first = asked.plan(checkpoint.path)
    assert kept.parallel_plan(checkpoint) == first
    assert (asked.times, told) == (1, [])


def test_a_loader_reads_and_never_writes(asked: Asked, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m")
    asked.plan(path, keep=False)
    assert not asked.folder.exists()
    asked.plan(path)
    asked.plan(path, keep=False)
    assert asked.times == 2


def test_a_refusal_is_not_kept(asked: Asked, tmp_path: Path) -> None:
    config = llama_config(architectures=["NoSuchForCausalLM"])
    path = write_checkpoint(tmp_path / "m", llama_tensors(), config)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="does not know NoSuchForCausalLM"):
            asked.plan(path)
    assert asked.times == 2


def test_what_is_told_of_a_configuration_that_came_in_between_is_not_taken(
    asked: Asked, tmp_path: Path
) -> None:
    """As where a link to the current model is moved while transformers is imported."""
    path = write_llama(tmp_path / "m")
    before = open_checkpoint(path)
    (path / "config.json").write_text(json.dumps(llama_config(num_attention_heads=12)))
    with pytest.raises(CheckpointError, match="has changed while it was read"):
        Architectures(asked.folder).parallel_plan(before)
    (path / "config.json").write_bytes(before.config.data)
    assert asked.plan(path) == read_parallel_plan(before)


def test_a_configuration_in_another_file_is_read_every_time(asked: Asked, tmp_path: Path) -> None:
    """transformers reads that one, and only config.json is known here."""
    config = llama_config(configuration_files=["config.5.0.0.json"])
    path = write_checkpoint(tmp_path / "m", llama_tensors(), config)
    for heads in (12, 6):
        text = json.dumps(llama_config(num_attention_heads=heads))
        (path / "config.5.0.0.json").write_text(text)
        assert asked.plan(path).attention_heads == (heads,)


def test_names_that_can_not_be_written_are_not_kept(asked: Asked, tmp_path: Path) -> None:
    config = llama_config(base_model_tp_plan={"\ud800": "colwise"})
    path = write_checkpoint(tmp_path / "m", llama_tensors(), config)
    assert asked.plan(path) == asked.plan(path)
    assert asked.times == 2


def test_what_was_said_while_transformers_was_upgraded_is_not_kept(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = iter(["5.0.0", "5.0.1"])
    monkeypatch.setattr(module, "released", lambda: next(versions))
    asked.plan(write_llama(tmp_path / "m"))
    assert not asked.folder.exists()


def test_a_place_that_can_not_be_written_to_is_no_fault(asked: Asked, tmp_path: Path) -> None:
    asked.folder.parent.touch()
    path = write_llama(tmp_path / "m")
    assert asked.plan(path) == read_parallel_plan(open_checkpoint(path))


# --- what it is for ------------------------------------------------------------------------------

_PLANNED = """
import sys
from pathlib import Path
from wcache.checkpoint import open_checkpoint
from wcache.config import Config, LayoutSection, ModelSection
from wcache.load.architectures import Architectures
from wcache.load.placement import plan
path, folder, quantization = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
config = Config(model=ModelSection(path=str(path), quantization=quantization),
                layout=LayoutSection(tp=2))
print(plan(open_checkpoint(path), config, 1, Architectures(folder, keep=False)).total_bytes)
print(*sorted({"torch", "transformers"} & sys.modules.keys()))
"""


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_a_plan_that_is_known_imports_neither_transformers_nor_torch(
    tmp_path: Path, quantization: Any
) -> None:
    path, folder = write_quantizable(tmp_path / "m"), tmp_path / "architecture"
    config = Config(
        model=ModelSection(path=str(path), quantization=quantization), layout=LayoutSection(tp=2)
    )
    want = plan(open_checkpoint(path), config, 1, Architectures(folder))
    assert want == plan(open_checkpoint(path), config, 1)
    told = subprocess.run(
        [sys.executable, "-c", _PLANNED, path, folder, quantization],
        capture_output=True, text=True, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    ).stdout  # fmt: skip
    assert told == f"{want.total_bytes}\n\n"
