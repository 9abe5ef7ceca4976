"""Writes a random-weight Qwen3 checkpoint, sharded, where no real model can be had.

    python scripts/random_qwen3.py FOLDER LAYERS [HIDDEN] [fp8]

bf16, or FP8 in blocks of 128x128, with the same weights before they are rounded. 36 layers are the
8B model's shape: 16.4 GB in bf16. HIDDEN, 4096 as in that model, may be a smaller multiple of 512:
dimensions are multiples of 128 at tp 1, 2 and 4 then too. The tokenizer knows the single bytes.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wcache.fp8 import BLOCK, ON_LOAD, grid, scale_name
from wcache.load.quantize import quantize_into

SHARD_BYTES = 4_000_000_000
KEPT = ("lm_head", "embed_tokens", "norm")
"""What stays in bf16 in a checkpoint of FP8 in blocks."""


def write(folder: Path, layers: int, hidden: int = 4096, *, fp8: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = Qwen3Config(
        vocab_size=151_936 if hidden == 4096 else 8192,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(hidden // 512, 4),
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
        **({"quantization_config": {**ON_LOAD, "fmt": "e4m3"}} if fp8 else {}),
    )
    config.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    config.quantization_config = None  # the names and shapes are those of the bf16 model
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.Generator(device).manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    used = 0
    for name, meta in model.state_dict().items():
        if used > SHARD_BYTES:
            shards.append({})
            used = 0
        tensor = torch.ones(meta.shape, dtype=torch.bfloat16, device=device)
        if "norm" not in name:
            tensor.normal_(0, 0.02, generator=source)
        made = {name: tensor}
        if fp8 and not any(part in name for part in KEPT):
            made = quantized(name, tensor)
        shards[-1].update((key, value.cpu()) for key, value in made.items())
        used += sum(value.nbytes for value in made.values())
    save(folder, shards)


def quantized(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    assert all(size % BLOCK == 0 for size in tensor.shape), name
    weight = torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
    scale = torch.empty(grid(tuple(tensor.shape)), dtype=torch.float32, device=tensor.device)
    quantize_into(tensor, weight, scale)
    return {name: weight, scale_name(name): scale}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that a server can be asked for text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def save(folder: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    names = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        names.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def main(words: list[str]) -> None:
    numbers = [word for word in words[1:] if word != "fp8"]
    if len(numbers) not in (1, 2) or not all(number.isdigit() for number in numbers):
        sys.exit(__doc__)
    write(Path(words[0]), *map(int, numbers), fp8="fp8" in words[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
