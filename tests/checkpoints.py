"""Small checkpoints for tests: a Llama in miniature, and files with any header that is wanted."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 48, 6, 3, 8, 96, 60


WRITTEN_NS = 10**18


def llama_config(**changes: Any) -> dict[str, Any]:
    """config.json of a Llama with 6 heads, 3 key-value heads and 2 layers."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    return config | changes


def llama_tensors(
    *, layers: int = 2, dtype: torch.dtype = torch.bfloat16, head: bool = False, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random weights for :func:`llama_config`; ``head`` for one that is not tied."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            prefix + "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    shapes["model.norm.weight"] = (HIDDEN,)
    if head:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


QWEN3_TP = (1, 2, 4)
"""Sizes at which every shard of :func:`qwen3_tensors` consists of whole blocks of 128x128."""


def qwen3_config(**changes: Any) -> dict[str, Any]:
    """config.json of a Qwen3 whose dimensions are multiples of 128, also when 4 ranks share it."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return config | changes


def qwen3_tensors(
    *, layers: int = 2, dtype: torch.dtype = torch.bfloat16, seed: int = 0, intermediate: int = 512
) -> dict[str, torch.Tensor]:
    """Random weights for :func:`qwen3_config`, norms of ones."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (64, 256), "model.norm.weight": (256,),
        "lm_head.weight": (64, 256),
    }  # fmt: skip
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + f"{norm}_layernorm.weight": (256,) for norm in ("input", "post_attention")
        }
        shapes |= {prefix + f"self_attn.{part}_norm.weight": (128,) for part in "qk"}
        shapes |= {prefix + f"self_attn.{part}_proj.weight": (512, 256) for part in "qkv"}
        shapes |= {
            prefix + f"mlp.{part}_proj.weight": (intermediate, 256) for part in ("gate", "up")
        }
        shapes[prefix + "self_attn.o_proj.weight"] = (256, 512)
        shapes[prefix + "mlp.down_proj.weight"] = (256, intermediate)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape, dtype=dtype)
        if "norm" in name
        else (torch.randn(shape, generator=generator) * 0.05).to(dtype)
        for name, shape in sorted(shapes.items())
    }


FP8_CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def in_fp8(
    tensors: Mapping[str, torch.Tensor], scale_dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """``tensors`` as an FP8 checkpoint of the model has them: random scales, projections alone.

    Blocks at the ends may be cut, as those of DeepSeek-V3's kv_a_proj are.
    """
    found: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            found[name] = tensor
            continue
        rows, columns = (-(-size // 128) for size in tensor.shape)
        scale = torch.rand(rows, columns, generator=generator) / 1000 + 1e-4
        found[name] = (tensor.float() * 1000).to(torch.float8_e4m3fn)
        found[name + "_scale_inv"] = scale.to(scale_dtype)
    return found


def write_qwen3(folder: Path, *, fp8: bool = False, **changes: Any) -> Path:
    """:func:`qwen3_tensors` in one file, in bf16 or as an FP8 checkpoint has them."""
    tensors = qwen3_tensors(intermediate=changes.get("intermediate_size", 512))
    if fp8:
        tensors, changes = in_fp8(tensors), {"quantization_config": FP8_CONFIG, **changes}
    return write_checkpoint(folder, tensors, qwen3_config(**changes))


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None = None,
    *,
    shards: int = 1,
) -> Path:
    """A checkpoint as save_pretrained writes it: one file, or an index and ``shards`` files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, llama_config() if config is None else config)
    if shards == 1:
        _save(dict(tensors), folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        _save({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return folder


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Every file has the same time, so that tests tell checkpoints apart by what is in them."""
    save_file(tensors, path, metadata={"format": "pt"})
    os.utime(path, ns=(WRITTEN_NS, WRITTEN_NS))


def write_llama(folder: Path, **changes: Any) -> Path:
    """A tied Llama in one file; ``changes`` are to its config."""
    config = llama_config(**changes)
    head = not config["tie_word_embeddings"]
    tensors = llama_tensors(layers=config["num_hidden_layers"], head=head)
    return write_checkpoint(folder, tensors, config)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def write_index(folder: Path, weight_map: Any) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def raw_file(header: Mapping[str, Any] | bytes, data: bytes, *, length: int | None = None) -> bytes:
    """A safetensors file with whatever header; ``length`` is what it says of the header's."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def info(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    """A tensor's entry in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
