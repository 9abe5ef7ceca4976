"""Models spread over ranks: each computes with its shard, and all get the whole model's logits."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import FP8_CONFIG, write_qwen3
from wcache.checkpoint import open_checkpoint
from wcache.engines.transformers.disk import Shard
from wcache.engines.transformers.group import Group
from wcache.engines.transformers.model import build
from wcache.engines.transformers.source import Source
from wcache.errors import CheckpointError, UsageError, WcacheError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 60,
    "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 59,
}  # fmt: skip
TOKENS = torch.tensor([[1, 5, 59, 20, 40, 19, 39, 0]])
CLOSE = 2e-5
"""Of logits near 1 in float32: sums over ranks are made in another order."""


class Exchange:
    """Stands in for torch.distributed: the ranks are threads, which meet in every operation."""

    def __init__(self, size: int) -> None:
        self.parts: list[torch.Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=30)

    def swap(self, rank: int, part: torch.Tensor) -> list[torch.Tensor]:
        self.parts[rank] = part
        self.barrier.wait()
        found = [one.clone() for one in self.parts if one is not None]
        self.barrier.wait()
        return found


class Threads(Group):
    """The group of one thread."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.handle.swap(self.rank, part)).sum(0)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.handle.swap(self.rank, part), dim=-1)


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options))


def tied() -> Any:
    return llama(tie_word_embeddings=True)


def untied() -> Any:
    return llama(tie_word_embeddings=False)


def biased() -> Any:
    """Has biases in layers whose output is summed."""
    return llama(attention_bias=True, mlp_bias=True)


def qwen2() -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))


def qwen3() -> Any:
    """Norms heads one by one, with a weight that every rank has whole."""
    config = transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False)
    return transformers.Qwen3ForCausalLM(config)


def gemma() -> Any:
    """Scales what its embedding finds."""
    config = transformers.Gemma3TextConfig(**SIZES, head_dim=8)
    return transformers.Gemma3ForCausalLM(config)


def phi() -> Any:
    """Rotates a part of each head, and has a bias in its output head."""
    sizes = SIZES | {"num_key_value_heads": 6}
    return transformers.PhiForCausalLM(transformers.PhiConfig(**sizes))


def saved(model: Any, folder: Path) -> Path:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    model.save_pretrained(folder)
    return folder


def shard(folder: Path, tp: int, rank: int) -> Shard:
    return Shard(open_checkpoint(folder), tp, rank, CPU)


def on_every_rank(folder: Path, tp: int, work: Callable[[Any], torch.Tensor]) -> list[torch.Tensor]:
    exchange = Exchange(tp)

    def run(rank: int) -> torch.Tensor:
        group = Threads(rank=rank, size=tp, handle=exchange)
        model = build(shard(folder, tp, rank), Source(str(folder), None), group=group)
        with torch.no_grad():
            return work(model)

    with ThreadPoolExecutor(tp) as pool:
        return list(pool.map(run, range(tp)))


def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(TOKENS).logits
    return found


def generated(model: Any, **options: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(
        TOKENS, attention_mask=torch.ones_like(TOKENS), do_sample=False, max_new_tokens=8, **options
    )
    return found


@pytest.mark.parametrize("make", [tied, untied, biased, qwen2, qwen3, gemma, phi])
def test_every_rank_gets_the_logits_of_the_whole_model(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    model = make()
    folder = saved(model, tmp_path)
    whole = type(model).from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        want = logits(whole)
    for found in on_every_rank(folder, 3, logits):
        assert found.shape == want.shape
        assert float((found - want).abs().max()) < CLOSE
    # The check is one that a missing exchange fails.
    assert float(want.abs().max()) > 100 * CLOSE


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}])
def test_every_rank_generates_the_same_tokens(options: dict[str, Any], tmp_path: Path) -> None:
    model = qwen3()
    folder = saved(model, tmp_path)
    whole = type(model).from_pretrained(folder, dtype=torch.float32)
    want = generated(whole)
    for found in on_every_rank(folder, 3, lambda model: generated(model, **options)):
        assert torch.equal(found, want)


def test_a_copy_of_a_model_computes_with_weights_of_its_own(tmp_path: Path) -> None:
    folder = saved(untied(), tmp_path)

    def work(model: Any) -> torch.Tensor:
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.zero_()
        return torch.stack([logits(model), logits(other)])

    for found in on_every_rank(folder, 3, work):
        assert float(found[0].abs().max()) > 0
        assert float(found[1].abs().max()) == 0


def test_parameters_are_the_weights_and_no_copies(tmp_path: Path) -> None:
    folder = saved(tied(), tmp_path)
    weights = shard(folder, 3, 2)
    group = Group(rank=2, size=3)
    model: Any = build(weights, Source(str(folder), None), group=group)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == weights.tensors[name].data_ptr()
    assert tuple(model.model.embed_tokens.weight.shape) == (20, 48)
    assert model.tp_size == 3


def test_scales_of_fp8_weights_are_cut_with_them(tmp_path: Path) -> None:
    folder = write_qwen3(tmp_path, fp8=True)
    weights = shard(folder, 2, 1)
    model: Any = build(weights, Source(str(folder), None), group=Group(rank=1, size=2))
    down = model.model.layers[0].mlp.down_proj
    assert (tuple(down.weight.shape), tuple(down.weight_scale_inv.shape)) == ((256, 256), (2, 2))
    assert weights.holds(down.weight_scale_inv)
    assert model.config.quantization_config.quant_method == FP8_CONFIG["quant_method"]


# --- refusals ---------------------------------------------------------------------------------


def test_a_model_without_a_plan_is_refused(tmp_path: Path) -> None:
    folder = saved(tied(), tmp_path / "llama")
    weights = shard(folder, 3, 0)
    bert = transformers.BertConfig(hidden_size=48, num_attention_heads=6, vocab_size=60)
    bert.architectures = ["BertModel"]
    bert.save_pretrained(tmp_path / "bert")
    manifest = weights.manifest
    weights.manifest = type(manifest)(
        **{name: getattr(manifest, name) for name in manifest.__struct_fields__}
        | {"fingerprint": type(manifest.fingerprint)(architecture="BertModel"), "tensors": ()}
    )
    with pytest.raises(CheckpointError, match="tp 3: transformers has no tensor-parallel plan"):
        build(weights, Source(str(tmp_path / "bert"), None), group=Group(rank=0, size=3))


def test_a_shard_of_another_cut_is_named(tmp_path: Path) -> None:
    folder = saved(untied(), tmp_path)
    with pytest.raises(WcacheError) as raised:
        build(shard(folder, 3, 0), Source(str(folder), None), group=Group(rank=0, size=1))
    assert "model.embed_tokens.weight is cached as [20, 48]" in raised.value.message
    weights = shard(folder, 1, 0)
    with pytest.raises(WcacheError) as raised:
        build(weights, Source(str(folder), None), group=Group(rank=2, size=3))
    assert "lm_head.weight is cached as [60, 48], and by the plan of" in raised.value.message
    assert raised.value.message.endswith("rank 2 of 3 has [20, 48]")
    assert raised.value.hint


def test_a_style_that_is_about_more_than_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(untied(), tmp_path)
    weights = shard(folder, 3, 0)
    plan = transformers.LlamaConfig.base_model_tp_plan | {"norm": "sequence_parallel"}
    monkeypatch.setattr(transformers.LlamaConfig, "base_model_tp_plan", plan)
    with pytest.raises(CheckpointError) as raised:
        build(weights, Source(str(folder), None), group=Group(rank=0, size=3))
    assert "has 'sequence_parallel' for model.norm, a LlamaRMSNorm" in raised.value.message


def test_a_plan_that_leaves_the_logits_apart_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tied()
    folder = saved(model, tmp_path)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_tp_plan", {})
    with torch.no_grad():
        want = logits(type(model).from_pretrained(folder, dtype=torch.float32))
    for found in on_every_rank(folder, 3, logits):
        assert float((found - want).abs().max()) < CLOSE


def test_a_shard_is_not_saved_as_a_model(tmp_path: Path) -> None:
    folder = saved(untied(), tmp_path)
    model: Any = build(shard(folder, 3, 0), Source(str(folder), None), group=Group(rank=0, size=3))
    with pytest.raises(UsageError, match="one shard of the model"):
        model.save_pretrained(tmp_path / "other")


def test_gradients_are_refused_where_they_would_be_wrong() -> None:
    part = torch.ones(2, requires_grad=True)
    for operation in (Group(rank=0, size=2).sum, Group(rank=0, size=2).gather):
        with pytest.raises(UsageError, match="does not train"):
            operation(part)
