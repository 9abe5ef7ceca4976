"""Which quantization methods are let through, and what is said of those that are not."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import (
    FP8_CONFIG,
    in_fp8,
    llama_config,
    llama_tensors,
    qwen3_config,
    qwen3_tensors,
    write_checkpoint,
    write_llama,
    write_qwen3,
)
from wcache import gate
from wcache.checkpoint import TensorEntry, open_checkpoint
from wcache.errors import ExitCode, UnsupportedQuantForIPCError
from wcache.gate import headers
from wcache.gate.__main__ import written_into
from wcache.gate.methods import BY_KEY, METHODS, key_of
from wcache.gate.settings import declared, methods_of

pytestmark = pytest.mark.unit

README = Path(__file__).parents[2] / "README.md"
EXPERTS = "model.layers.1.mlp.experts"


def _refused(path: Path) -> UnsupportedQuantForIPCError:
    checkpoint = open_checkpoint(path)
    with pytest.raises(UnsupportedQuantForIPCError) as caught:
        gate.check(checkpoint)
    assert caught.value.exit_code == ExitCode.CONFIGURATION
    assert caught.value.hint == BY_KEY[caught.value.method].way_out
    assert "\n" not in caught.value.message
    return caught.value


def _keys(settings: dict[str, Any]) -> list[str]:
    return [found.key for found in methods_of(settings, "x")]


def test_plain_weights_pass(tmp_path: Path) -> None:
    assert gate.check(open_checkpoint(write_llama(tmp_path / "m"))) == gate.Quantization("none")


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16])
def test_block_wise_fp8_passes(tmp_path: Path, scale: torch.dtype) -> None:
    tensors = in_fp8(qwen3_tensors(), scale)
    config = qwen3_config(quantization_config=FP8_CONFIG)
    found = gate.check(open_checkpoint(write_checkpoint(tmp_path / "m", tensors, config)))
    assert (found.method, found.settings) == ("fp8", FP8_CONFIG)


def test_masks_and_positions_of_old_checkpoints_pass(tmp_path: Path) -> None:
    tensors = llama_tensors() | {
        "h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
        "embeddings.position_ids": torch.arange(8, dtype=torch.int32)[None],
        "bn.num_batches_tracked": torch.tensor(3),
    }
    assert gate.check(open_checkpoint(write_checkpoint(tmp_path / "m", tensors))).method == "none"


# --- what config.json says ----------------------------------------------------------------------

SETTINGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "fp8": (FP8_CONFIG, ["fp8"]),
    "fp8 of which only headers tell the blocks": ({"quant_method": "fp8"}, ["fp8"]),
    "fp8 of DeepSeek-V3.1": ({**FP8_CONFIG, "fmt": "e4m3", "scale_fmt": "ue8m0"}, ["fp8"]),
    "fp8 with plain layers": ({**FP8_CONFIG, "modules_to_not_convert": ["lm_head"]}, ["fp8"]),
    "fp8 per tensor": ({"quant_method": "fp8", "weight_block_size": None}, ["fp8-tensor"]),
    "fp8 in rows": ({**FP8_CONFIG, "weight_block_size": [1, 128]}, ["fp8-channel"]),
    "fp8 in nonsense": ({**FP8_CONFIG, "weight_block_size": "128"}, ["fp8-channel"]),
    "fp8 with static activations": ({**FP8_CONFIG, "activation_scheme": "static"}, ["fp8-static"]),
    "fp8 of the other kind": ({**FP8_CONFIG, "fmt": "e5m2"}, ["fp8-e5m2"]),
    "fp8 embeddings": ({**FP8_CONFIG, "modules_to_convert": ["embed"]}, ["fp8-tensor"]),
    "fp8 with fp4 experts": ({**FP8_CONFIG, "expert_dtype": "fp4"}, ["fp8", "mxfp4"]),
    "fp8 with an inner table": (
        {**FP8_CONFIG, "experts": {"quant_method": "mxfp4"}}, ["fp8", "mxfp4"]
    ),
    "fp8 with a table of something": ({**FP8_CONFIG, "x": {"y": 1}}, ["fp8", "unknown"]),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": []}, ["mxfp4"]),
    "gptq": ({"quant_method": "gptq", "bits": 4}, ["gptq"]),
    "gptq for Marlin": ({"quant_method": "GPTQ_Marlin"}, ["gptq"]),
    "gptq of a file of its own": ({"bits": 4, "group_size": 128, "desc_act": False}, ["gptq"]),
    "awq": ({"quant_method": "awq"}, ["awq"]),
    "awq of a file of its own": ({"w_bit": 4, "q_group_size": 128}, ["awq"]),
    "marlin": ({"quant_method": "marlin"}, ["marlin"]),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["bitsandbytes"]),
    "bitsandbytes of old": ({"load_in_8bit": True}, ["bitsandbytes"]),
    "gguf": ({"quant_method": "gguf"}, ["gguf"]),
    "hqq": ({"quant_method": "hqq"}, ["hqq"]),
    "aqlm": ({"quant_method": "aqlm"}, ["codebook"]),
    "mlx": ({"bits": 4, "group_size": 64}, ["mlx"]),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, ["fp8-channel"]),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ["nvfp4"]),
    "modelopt of another kind": ({"quant_method": "modelopt", "quant_algo": "W8A8"}, ["modelopt"]),
    "modelopt without an algorithm": ({"quant_method": "modelopt"}, ["modelopt"]),
    "modelopt of a file of its own": (
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}, ["fp8-tensor"]
    ),
    "modelopt for the KV cache alone": (
        {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, []
    ),
    "modelopt, mixed": (
        {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
            "a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A16_AWQ"}, "c": "odd"}}},
        ["fp8-tensor", "awq", "modelopt"],
    ),
    "compressed-tensors, mixed": (
        {"quant_method": "compressed-tensors", "config_groups": {
            "group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
            "group_1": {"weights": {"num_bits": 4, "type": "float", "group_size": 32}},
            "group_2": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}},
            "group_3": {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}},
            "group_4": None}},
        ["fp8-channel", "mxfp4", "nvfp4", "compressed-tensors", "compressed-tensors"],
    ),
    "compressed-tensors of nothing": (
        {"quant_method": "compressed-tensors", "config_groups": {}}, ["compressed-tensors"]
    ),
    "something new": ({"quant_method": "superquant"}, ["unknown"]),
    "nothing that makes sense": ({"colour": "red"}, ["unknown"]),
    "a method that is a number": ({"quant_method": 7}, ["unknown"]),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_name_their_methods(case: str) -> None:
    settings, keys = SETTINGS[case]
    assert _keys(settings) == keys


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "c: quantization_config"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}},
         "c: text_config.quantization_config"),
        ({"compression_config": {"quant_method": "awq"}}, "c: compression_config"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "c: quantization"),
    ],
)  # fmt: skip
def test_settings_are_found_wherever_they_are(config: dict[str, Any], where: str) -> None:
    assert [found.where for found in declared(config, "c")] == [where]


def test_a_table_that_is_called_alike_is_no_quantization() -> None:
    config = {"codec": {"quantization": {"codebook_size": 1024}}, "quantization_config": {}}
    assert list(declared(config, "c")) == []


def test_every_method_that_transformers_has_is_known() -> None:
    methods = pytest.importorskip("transformers.utils.quantization_config").QuantizationMethod
    unknown = {"gemma"}  # what nobody has published yet
    assert {m.value for m in methods if key_of(m.value) == "unknown"} <= unknown


# --- what lies in the files ---------------------------------------------------------------------

U8, I32, F8 = torch.uint8, torch.int32, torch.float8_e4m3fn


def _of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=U8).to(dtype)


GROUPS: dict[str, tuple[str, dict[str, torch.Tensor]]] = {
    "mxfp4 experts": ("mxfp4", {
        "gate_up_proj_blocks": _of((2, 8, 2, 16), U8), "gate_up_proj_scales": _of((2, 8, 2), U8)}),
    "mxfp4, packed": ("mxfp4", {"weight": _of((8, 16), U8), "weight_scale": _of((8, 1), U8)}),
    "nvfp4": ("nvfp4", {"weight": _of((8, 8), U8), "weight_scale": _of((8, 1), F8),
                        "weight_scale_2": torch.tensor(1.0)}),
    "awq": ("awq", {"qweight": _of((8, 8), I32), "qzeros": _of((1, 8), I32)}),
    "gptq": ("gptq", {"qweight": _of((8, 8), I32), "qzeros": _of((1, 8), I32),
                      "g_idx": _of((8,), I32)}),
    "marlin": ("marlin", {"B": _of((8, 8), I32), "s": torch.ones(1, 8)}),
    "fp8 per tensor": ("fp8-tensor", {"weight": _of((128, 128), F8),
                                      "weight_scale": torch.tensor(1.0)}),
    "fp8 per channel": ("fp8-channel", {"weight": _of((128, 128), F8),
                                        "weight_scale": torch.ones(128, 1)}),
    "fp8 with static activations": ("fp8-static", {
        "weight": _of((128, 128), F8), "weight_scale_inv": torch.ones(1, 1),
        "input_scale": torch.tensor(1.0)}),
    "e5m2": ("fp8-e5m2", {"weight": _of((128, 128), torch.float8_e5m2)}),
    "mxfp8": ("fp8-ue8m0", {"weight": _of((128, 128), F8), "weight_scale": _of((128, 4), U8)}),
    "bitsandbytes": ("bitsandbytes", {"absmax": torch.ones(4), "quant_map": torch.ones(16)}),
    "LLM.int8": ("bitsandbytes", {"weight": _of((8, 8), torch.int8), "SCB": torch.ones(8)}),
    "int8": ("eetq", {"weight": _of((8, 8), torch.int8), "weight_scales": torch.ones(8)}),
    "packed": ("compressed-tensors", {"weight_packed": _of((8, 1), I32),
                                      "weight_scale": torch.ones(8, 1)}),
    "hqq": ("hqq", {"W_q": _of((8, 8), U8)}),
    "mlx": ("mlx", {"weight": _of((8, 1), torch.uint32), "scales": torch.ones(8, 1)}),
    "bitnet": ("bitnet", {"weight": _of((2, 8), U8), "weight_scale": torch.ones(1)}),
    "aqlm": ("codebook", {"codes": _of((8, 1, 1), torch.int16), "codebooks": torch.ones(1, 4)}),
    "quanto": ("quanto", {"_data": _of((8, 8), torch.int8), "_scale": torch.ones(8, 1)}),
    "no name for it": ("packed", {"w13": _of((8, 8), U8)}),
    "qweight alone": ("packed", {"qweight": _of((8, 8), I32), "scales": torch.ones(1, 8)}),
}  # fmt: skip


@pytest.mark.parametrize("case", GROUPS)
@pytest.mark.parametrize("shards", [1, 3])
def test_one_group_of_tensors_is_enough(tmp_path: Path, case: str, shards: int) -> None:
    """config.json is silent about it, and all other weights are plain."""
    key, group = GROUPS[case]
    tensors = llama_tensors() | {f"{EXPERTS}.{leaf}": tensor for leaf, tensor in group.items()}
    error = _refused(write_checkpoint(tmp_path / "m", tensors, shards=shards))
    assert error.method == key
    assert error.message == (
        f"{tmp_path / 'm'}: {EXPERTS}: weights quantized with {BY_KEY[key].title}"
        f" can not be kept: {BY_KEY[key].reason}"
    )


def test_scales_of_bare_exponents_are_refused(tmp_path: Path) -> None:
    tensors = {
        f"{EXPERTS}.weight": TensorEntry(
            file="f", dtype="F8_E4M3", shape=(128, 128), start=0, nbytes=1 << 14
        ),
        f"{EXPERTS}.scale": TensorEntry(file="f", dtype="F8_E8M0", shape=(1, 1), start=0, nbytes=1),
    }
    assert [found.key for found in headers.found_in(tensors)] == ["fp8-ue8m0"]


def test_mxfp4_experts_do_not_hide_behind_an_fp8_config(tmp_path: Path) -> None:
    _, group = GROUPS["mxfp4 experts"]
    tensors = in_fp8(qwen3_tensors())
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        tensors |= {prefix + leaf: tensor.clone() for leaf, tensor in group.items()}
    config = qwen3_config(quantization_config=FP8_CONFIG)
    error = _refused(write_checkpoint(tmp_path / "m", tensors, config))
    assert error.method == "mxfp4"
    assert "model.layers.0.mlp.experts (and 1 more): weights quantized with MXFP4" in error.message


def test_all_methods_of_a_mixture_are_named(tmp_path: Path) -> None:
    tensors = llama_tensors()
    for case in ("awq", "mxfp4 experts"):
        tensors |= {f"m.{case.split()[0]}.{leaf}": t for leaf, t in GROUPS[case][1].items()}
    config = llama_config(quantization_config={"quant_method": "superquant"})
    error = _refused(write_checkpoint(tmp_path / "m", tensors, config))
    assert error.message == (
        f"{tmp_path / 'm'}: config.json: quantization_config (and 2 more: also AWQ, MXFP4):"
        " weights quantized with 'superquant' can not be kept: wcache knows no method of that"
        " name, and keeps only what is known to be carried whole"
    )


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("hf_quant_config.json", '{"quantization": {"quant_algo": "NVFP4"}}', "nvfp4"),
        ("quantize_config.json", '{"bits": 4, "group_size": 128, "sym": true}', "gptq"),
        ("quant_config.json", '{"w_bit": 4}', "awq"),
    ],
)
def test_files_beside_config_json_are_looked_at(
    tmp_path: Path, name: str, text: str, key: str
) -> None:
    path = write_llama(tmp_path / "m")
    (path / name).write_text(text)
    error = _refused(path)
    assert error.method == key
    assert f": {name}: weights quantized with" in error.message


def test_gguf_beside_safetensors_is_not_what_is_loaded(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m")
    (path / "model.gguf").touch()
    assert gate.check(open_checkpoint(path)).method == "none"


def test_many_tensors_are_looked_at_quickly() -> None:
    """Asks for the marks of each kind of leaf once, not of each of 91,000 tensors."""
    headers._mark.cache_clear()
    entry = TensorEntry(file="f", dtype="BF16", shape=(8, 8), start=0, nbytes=128)
    tensors = {f"model.layers.{n}.mlp.experts.weight": entry for n in range(20_000)}
    assert list(headers.found_in(tensors)) == []
    assert headers._mark.cache_info().misses == 1


# --- the table ----------------------------------------------------------------------------------


def test_every_refusal_has_a_reason_and_a_way_out() -> None:
    assert len({method.key for method in METHODS}) == len(METHODS)
    for method in METHODS:
        assert bool(method.kept) != bool(method.reason), method.key
        assert method.way_out


def test_the_readme_has_the_table_as_it_is_in_the_code() -> None:
    text = README.read_text()
    assert written_into(text) == text


def test_the_table_is_printed() -> None:
    command = [sys.executable, "-m", "wcache.gate"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout in README.read_text()


def test_the_gate_needs_no_torch() -> None:
    code = "import sys, wcache.gate; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "set()\n"


def test_an_fp8_checkpoint_of_the_tests_is_one(tmp_path: Path) -> None:
    assert gate.check(open_checkpoint(write_qwen3(tmp_path / "m", fp8=True))).method == "fp8"
