"""Plans that transformers states, read as data from the real package."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoints import llama_config, llama_tensors, write_checkpoint, write_llama
from wcache.checkpoint import open_checkpoint
from wcache.config import Config, LayoutSection, ModelSection
from wcache.errors import CheckpointError
from wcache.load.parallel import read_parallel_plan
from wcache.load.placement import generic, plan
from wcache.load.plan import Slice

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.unit


def _config(path: Path, **layout: int) -> Config:
    return Config(model=ModelSection(path=str(path)), layout=LayoutSection(**layout))


def test_llama_has_a_plan(tmp_path: Path) -> None:
    parallel = read_parallel_plan(open_checkpoint(write_llama(tmp_path / "m")))
    assert parallel.prefix == "model"
    assert parallel.base["layers.*.self_attn.o_proj"] == "rowwise"
    assert parallel.head["lm_head"].startswith("colwise")
    assert parallel.stages.index("embed_tokens") < parallel.stages.index("layers")
    assert (parallel.attention_heads, parallel.kv_heads) == ((6,), (3,))


def test_llama_is_sharded_by_it(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m")
    planned = plan(open_checkpoint(path), _config(path, tp=3), 2)
    slices = {target.name: target.slice for target in planned.targets}
    assert slices["model.layers.0.mlp.down_proj.weight"] == Slice(1, 64, 96)
    assert slices["model.embed_tokens.weight"] == slices["lm_head.weight"] == Slice(0, 40, 60)


def test_llama_is_cut_into_stages_by_it(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m")
    names = {t.name for t in plan(open_checkpoint(path), _config(path, pp=2), 1).targets}
    assert {"model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"} <= names
    assert not any(name.startswith("model.layers.0.") for name in names)


SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM",
     "Gemma3ForCausalLM", "GPTNeoXForCausalLM", "CohereForCausalLM", "PhiForCausalLM"],
)  # fmt: skip
def test_every_parameter_is_cut_as_transformers_would(architecture: str, tmp_path: Path) -> None:
    """Its plan of a model that was built, with all rules gathered, against ours from data."""
    model_class = getattr(transformers, architecture)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**SMALL))
    tensors = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    config = {**model.config.to_dict(), "architectures": [architecture]}
    path = write_checkpoint(tmp_path / "m", tensors, config)
    planned = plan(open_checkpoint(path), _config(path, tp=2), 1)

    found = {t.name: t.slice.dim if t.slice else None for t in planned.targets}
    assert found.keys() >= tensors.keys()
    for name in tensors:
        module, _, leaf = generic(name).rpartition(".")
        # 5.17 left the embedding whole, later versions and we do not.
        default = "embedding_rowwise" if module.endswith("embed_tokens") else "replicate"
        style = model.tp_plan.get(module, default)
        if style.startswith(("colwise", "embedding_rowwise")):
            expected = 0
        elif style.startswith("rowwise") and leaf == "weight":
            expected = 1
        else:
            expected = None
        assert (name, style, found[name]) == (name, style, expected)


def test_tp_2_would_split_a_head(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m")
    with pytest.raises(CheckpointError, match="tp 2 would split a head: 3 key-value heads"):
        plan(open_checkpoint(path), _config(path, tp=2), 0)


def test_a_model_without_a_plan_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["BertModel"], "model_type": "bert"}
    path = write_checkpoint(tmp_path / "m", llama_tensors(), config)
    with pytest.raises(CheckpointError) as caught:
        plan(open_checkpoint(path), _config(path, tp=2), 0)
    assert caught.value.message == "tp 2: transformers has no tensor-parallel plan for BertModel"


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (llama_config(architectures=["NoSuchForCausalLM"]), "does not know NoSuchForCausalLM"),
        (llama_config(model_type="no_such"), "can not read the config of LlamaForCausalLM"),
        (llama_config(hidden_size="wide"), "can not read the config of LlamaForCausalLM"),
        (llama_config(architectures=None), "config.json names no architecture"),
        (
            {"architectures": ["X"], "model_type": "x", "auto_map": {"AutoConfig": "evil.Config"}},
            "can not read the config of X",
        ),
    ],
)
def test_models_that_transformers_does_not_know(
    tmp_path: Path, config: dict[str, object], line: str
) -> None:
    path = write_checkpoint(tmp_path / "m", llama_tensors(), config)
    (path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(CheckpointError) as caught:
        plan(open_checkpoint(path), _config(path, tp=3), 0)
    assert line in caught.value.message
    assert "\n" not in caught.value.message
    assert not (tmp_path / "ran").exists()


_WITHOUT = """
import sys
sys.modules["transformers"] = sys.modules["torch"] = None
from pathlib import Path
from wcache.checkpoint import open_checkpoint
from wcache.config import Config, LayoutSection, ModelSection
from wcache.errors import CheckpointError
from wcache.load.placement import generic, plan
path = Path(sys.argv[1])
config = Config(model=ModelSection(path=str(path)), layout=LayoutSection(tp=int(sys.argv[2])))
try:
    print(len(plan(open_checkpoint(path), config, 0).targets))
except CheckpointError as error:
    print(error.message, "|", error.hint)
"""


@pytest.mark.parametrize(
    ("tp", "said"),
    [
        (1, "21"),
        (
            3,
            "transformers, which knows how models are built and sharded, is not installed"
            " | pip install 'wcache[transformers]'",
        ),
    ],
)
def test_transformers_is_needed_for_sharding_only(tmp_path: Path, tp: int, said: str) -> None:
    path = write_llama(tmp_path / "m")
    command = [sys.executable, "-c", _WITHOUT, str(path), str(tp)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == (said, "")
