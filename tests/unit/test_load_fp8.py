"""FP8 weights from the order to the manifest: as a checkpoint has them, and made on load."""

import logging
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import (
    FP8_CONFIG,
    QWEN3_TP,
    in_fp8,
    llama_config,
    llama_tensors,
    qwen3_config,
    qwen3_tensors,
    write_checkpoint,
    write_llama,
    write_qwen3,
)
from tests.loading import Daemon, manifest_of, tensors_of
from tests.unit.test_quantize import quantized
from wcache.checkpoint import identify, open_checkpoint
from wcache.config import Config, LayoutSection, MemorySection, ModelSection
from wcache.errors import CheckpointError
from wcache.fingerprint import Fingerprint, compare, digest_of, wanted_by
from wcache.fp8 import ON_LOAD
from wcache.load import job
from wcache.load.linears import fp8_layers, quantizable
from wcache.load.placement import plan
from wcache.load.report import failure_told
from wcache.manifest import Manifest
from wcache.paths import RankId
from wcache.protocol.messages import LoadOrder

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

# By the last part of their module's name, the dimension that tensor parallelism cuts.
DIMS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "lm_head": 0,
        "embed_tokens": 0, "o_proj": 1, "down_proj": 1}  # fmt: skip


def _config(path: Path, *, tp: int = 1, quantization: Any = "auto", **model: Any) -> Config:
    return Config(
        model=ModelSection(path=str(path), quantization=quantization, **model),
        layout=LayoutSection(tp=tp),
        memory=MemorySection(slab_bytes=2 << 20),
    )


def _loaded(config: Config, rank: int = 0) -> tuple[Manifest, dict[str, torch.Tensor]]:
    with Daemon(config) as daemon, failure_told(daemon):
        job.load(daemon, LoadOrder(generation=1, config=config), RankId("", rank))
        found = {name: tensor.clone() for name, tensor in tensors_of(daemon.generation).items()}
        return manifest_of(daemon.generation), found


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        one, other = (t.contiguous().view(-1).view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(one, other), name
    return True


def _shard(whole: dict[str, torch.Tensor], tp: int, rank: int) -> dict[str, torch.Tensor]:
    parts = {}
    for name, tensor in whole.items():
        dim = DIMS.get(name.split(".")[-2])
        parts[name] = tensor if dim is None else tensor.chunk(tp, dim)[rank]
    return parts


def _made(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Projections quantized whole, everything else as it is."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            found[name], found[name + "_scale_inv"] = quantized(tensor)
    return found


@pytest.mark.parametrize("tp", QWEN3_TP)
def test_scales_of_a_checkpoint_are_sharded_with_their_blocks(tmp_path: Path, tp: int) -> None:
    path = write_qwen3(tmp_path / "m", fp8=True)
    whole = load_file(path / "model.safetensors")
    for rank in range(tp):
        manifest, found = _loaded(_config(path, tp=tp), rank)
        assert _same(found, _shard(whole, tp, rank))
        assert manifest.fingerprint.quantization == "fp8"
        assert manifest.fingerprint.quantization_config == digest_of(FP8_CONFIG)


def test_scales_may_be_bf16(tmp_path: Path) -> None:
    tensors = in_fp8(qwen3_tensors(), torch.bfloat16)
    config = qwen3_config(quantization_config=FP8_CONFIG)
    path = write_checkpoint(tmp_path / "m", tensors, config, shards=3)
    assert _same(_loaded(_config(path, tp=2), 1)[1], _shard(tensors, 2, 1))


def test_blocks_that_are_cut_at_the_end_of_a_weight_are_carried(tmp_path: Path) -> None:
    path = write_qwen3(tmp_path / "m", fp8=True, intermediate_size=200)
    manifest, found = _loaded(_config(path))
    assert _same(found, load_file(path / "model.safetensors"))
    shapes = {tensor.name: tensor.shape for tensor in manifest.tensors}
    assert shapes["model.layers.0.mlp.down_proj.weight_scale_inv"] == (2, 2)


@pytest.mark.parametrize("tp", QWEN3_TP)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_made_on_load_are_those_of_the_whole_cut(
    tmp_path: Path, tp: int, dtype: torch.dtype
) -> None:
    tensors = qwen3_tensors(dtype=dtype)
    path = write_checkpoint(tmp_path / "m", tensors, qwen3_config(), shards=2)
    for rank in range(tp):
        manifest, found = _loaded(_config(path, tp=tp, quantization="fp8"), rank)
        assert _same(found, _shard(_made(tensors), tp, rank))
        names = [tensor.name for tensor in manifest.tensors]
        for index, name in enumerate(names):
            if name.endswith("_scale_inv"):
                assert names[index - 1] + "_scale_inv" == name
        assert len({tensor.storage for tensor in manifest.tensors}) == len(names)


def test_what_is_not_quantized_is_converted(tmp_path: Path) -> None:
    """And what is, is made of the checkpoint's own values."""
    tensors = qwen3_tensors(dtype=torch.float32)
    path = write_checkpoint(tmp_path / "m", tensors, qwen3_config())
    _, found = _loaded(_config(path, quantization="fp8", dtype="bfloat16"))
    expected = {
        name: tensor.to(torch.bfloat16)
        if not name.endswith(("_proj.weight", "_scale_inv"))
        else tensor
        for name, tensor in _made(tensors).items()
    }
    assert _same(found, expected)


def test_a_tied_embedding_is_not_quantized(tmp_path: Path) -> None:
    tensors = {name: t for name, t in qwen3_tensors().items() if name != "lm_head.weight"}
    path = write_checkpoint(tmp_path / "m", tensors, qwen3_config(tie_word_embeddings=True))
    manifest, found = _loaded(_config(path, quantization="fp8"))
    (head,) = (t for t in manifest.tensors if t.name == "lm_head.weight")
    assert head.tied_to == "model.embed_tokens.weight"
    assert found["lm_head.weight"].dtype == torch.bfloat16
    assert found["lm_head.weight"].equal(tensors["model.embed_tokens.weight"])


def test_weights_without_whole_blocks_keep_their_dtype(tmp_path: Path) -> None:
    path = write_qwen3(tmp_path / "m", intermediate_size=200)
    _, found = _loaded(_config(path, quantization="fp8"))
    assert found["model.layers.0.mlp.down_proj.weight"].dtype == torch.bfloat16
    assert found["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn


def test_it_is_said_when_nothing_can_be_quantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_llama(tmp_path / "m")
    with caplog.at_level(logging.WARNING):
        _, found = _loaded(_config(path, quantization="fp8"))
    assert _same(found, llama_tensors() | {"lm_head.weight": found["model.embed_tokens.weight"]})
    assert "changes nothing" in caplog.text


def test_an_fp8_checkpoint_is_what_was_asked_for_already(tmp_path: Path) -> None:
    path = write_qwen3(tmp_path / "m", fp8=True)
    manifest, found = _loaded(_config(path, quantization="fp8"))
    assert _same(found, load_file(path / "model.safetensors"))
    assert manifest.fingerprint.quantization_config == digest_of(FP8_CONFIG)


@pytest.mark.parametrize(
    ("fp8", "quantization", "tp", "sizes", "line", "hint"),
    [
        (False, "fp8", 4, {"intermediate_size": 256},
         "tp 4 would cut a block of 'model.layers.0.mlp.down_proj.weight': dimension 1 has 256, its"
         " shards have 64, which is no multiple of 128", "tp can be 1, 2"),
        (True, "auto", 4, {"intermediate_size": 256},
         "tp 4 would cut a block of 'model.layers.0.mlp.down_proj.weight': dimension 1 has 256, its"
         " shards have 64, which is no multiple of 128", "tp can be 1, 2"),
        (True, "auto", 2, {"intermediate_size": 200},
         "tp 2 would cut a block of 'model.layers.0.mlp.down_proj.weight': dimension 1 has 200, its"
         " shards have 100, which is no multiple of 128", "tp can be 1"),
    ],
)  # fmt: skip
def test_an_edge_inside_a_block_is_refused(
    tmp_path: Path, fp8: bool, quantization: str, tp: int, sizes: dict[str, int], line: str,
    hint: str,
) -> None:  # fmt: skip
    path = write_qwen3(tmp_path / "m", fp8=fp8, **sizes)
    for rank in range(tp):
        with pytest.raises(CheckpointError) as caught:
            plan(open_checkpoint(path), _config(path, tp=tp, quantization=quantization), rank)
        assert (caught.value.message, caught.value.hint) == (line, hint)


def test_a_weight_without_whole_blocks_may_be_cut_anywhere(tmp_path: Path) -> None:
    path = write_qwen3(tmp_path / "m", intermediate_size=200)
    _, found = _loaded(_config(path, tp=2, quantization="fp8"), 1)
    assert found["model.layers.0.mlp.down_proj.weight"].shape == (256, 100)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_not_quantized(tmp_path: Path, value: float) -> None:
    tensors = qwen3_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"][300, 7] = value
    path = write_checkpoint(tmp_path / "m", tensors, qwen3_config())
    with pytest.raises(CheckpointError) as caught:
        _loaded(_config(path, quantization="fp8"))
    assert caught.value.message == (
        "weight 'model.layers.1.mlp.up_proj.weight' has values that are not finite, and can not be"
        " quantized"
    )
    assert _loaded(_config(path))[0].fingerprint.quantization == "none"


# --- which weights ------------------------------------------------------------------------------


def test_the_weights_are_those_that_transformers_chooses(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_qwen3(tmp_path / "m"))
    names = {name for name in checkpoint.tensors if name.endswith("_proj.weight")}
    assert quantizable(checkpoint, fp8_layers(checkpoint)) == names


def test_a_checkpoint_of_the_bare_model_is_quantized_too(tmp_path: Path) -> None:
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in qwen3_tensors().items()
        if name != "lm_head.weight"
    }
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", tensors, qwen3_config()))
    assert "layers.0.mlp.up_proj.weight" in quantizable(checkpoint, fp8_layers(checkpoint))
    assert len(quantizable(checkpoint, fp8_layers(checkpoint))) == 14


def _moe(layers: int = 1) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = qwen3_config(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_hidden_layers=layers,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=128,
    )  # fmt: skip
    tensors = {n: t for n, t in qwen3_tensors(layers=layers).items() if ".mlp." not in n}
    for layer in range(layers):
        mlp = f"model.layers.{layer}.mlp."
        tensors[mlp + "gate.weight"] = torch.randn(128, 256).to(torch.bfloat16)
        for expert in range(2):
            for part in ("gate_proj", "up_proj", "down_proj"):
                shape = (256, 128) if part == "down_proj" else (128, 256)
                tensor = torch.randn(shape).to(torch.bfloat16)
                tensors[f"{mlp}experts.{expert}.{part}.weight"] = tensor
    return config, tensors


def test_experts_are_quantized_and_their_router_is_not(tmp_path: Path) -> None:
    config, tensors = _moe()
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", tensors, config))
    found = quantizable(checkpoint, fp8_layers(checkpoint))
    assert {name for name in found if "experts" in name} == {n for n in tensors if "experts" in n}
    assert "model.layers.0.mlp.gate.weight" not in found


def test_fused_experts_are_refused_by_name(tmp_path: Path) -> None:
    config, tensors = _moe()
    tensors = {n: t for n, t in tensors.items() if "experts" not in n}
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(2, 256, 256).bfloat16()
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", tensors, config))
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.mlp\.experts\.gate_up_proj'"):
        quantizable(checkpoint, fp8_layers(checkpoint))


def test_layers_that_the_checkpoint_names_otherwise_are_refused(tmp_path: Path) -> None:
    tensors = {
        name.replace("layers.1.mlp", "layers.1.ffn"): t for name, t in qwen3_tensors().items()
    }
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", tensors, qwen3_config()))
    with pytest.raises(CheckpointError) as caught:
        quantizable(checkpoint, fp8_layers(checkpoint))
    assert caught.value.message == (
        "transformers quantizes model.layers.1.mlp.down_proj of Qwen3ForCausalLM, which the"
        " checkpoint does not have under that name"
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"architectures": []}, "config.json names no architecture"),
        ({"architectures": ["NoSuchModel"]}, "does not know NoSuchModel"),
        ({"model_type": "no_such_type"}, "can not read the config of LlamaForCausalLM"),
        ({"hidden_size": 0, "head_dim": 0}, "can not be built to see what is quantized of it"),
        ({"num_attention_heads": -1}, "LlamaForCausalLM"),
    ],
)
def test_models_that_can_not_be_built_are_one_line(
    tmp_path: Path, change: dict[str, Any], line: str
) -> None:
    tensors = llama_tensors(head=False)
    path = write_checkpoint(tmp_path / "m", tensors, llama_config(**change))
    with pytest.raises(CheckpointError, match=re.escape(line)) as caught:
        fp8_layers(open_checkpoint(path))
    assert "\n" not in caught.value.message


# --- identity -----------------------------------------------------------------------------------


def test_bf16_and_fp8_of_one_checkpoint_are_told_apart_both_ways(tmp_path: Path) -> None:
    path = write_qwen3(tmp_path / "m")
    content = identify(open_checkpoint(path)).digest
    plain, made = (_config(path, content=content, quantization=q) for q in ("auto", "fp8"))
    held, held_fp8 = (_loaded(config)[0].fingerprint for config in (plain, made))
    assert compare(held, wanted_by(plain, 0)) == compare(held_fp8, wanted_by(made, 0)) == ()
    assert [str(found) for found in compare(held, wanted_by(made, 0))] == [
        "dtype: cached auto, wanted fp8",
        "quantization: cached none, wanted fp8",
    ]
    assert [str(found) for found in compare(held_fp8, wanted_by(plain, 0))] == [
        "dtype: cached fp8, wanted auto"
    ]
    assert held_fp8.quantization_config == digest_of(ON_LOAD)
    assert wanted_by(_config(path, quantization="fp8", dtype="float16"), 0).dtype == "fp8+float16"


def test_an_engine_with_other_settings_is_told_the_field(tmp_path: Path) -> None:
    held = _loaded(_config(write_qwen3(tmp_path / "m", fp8=True)))[0].fingerprint
    engine = Fingerprint(
        quantization="fp8",
        quantization_config=digest_of({**FP8_CONFIG, "modules_to_not_convert": ["lm_head"]}),
    )
    (found,) = compare(held, engine)
    assert (found.field, found.cached) == ("quantization_config", digest_of(FP8_CONFIG))
    asked = msgspec.structs.replace(engine, quantization_config=digest_of(FP8_CONFIG))
    assert compare(held, asked) == ()
