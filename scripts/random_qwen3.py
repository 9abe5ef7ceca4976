"""Writes a random-weight Qwen3 checkpoint, bf16 and sharded, where no real model can be had.

    python scripts/random_qwen3.py FOLDER LAYERS [HIDDEN]

36 layers are the 8B model's shape: 16.4 GB. HIDDEN, 4096 as in that model, may be a smaller
multiple of 512: dimensions are multiples of 128 at tp 1, 2 and 4 then too. There is no tokenizer;
give prompts as token ids.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

SHARD_BYTES = 4_000_000_000


def write(folder: Path, layers: int, hidden: int = 4096) -> None:
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
    )
    config.save_pretrained(folder)
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
        tensor = torch.ones(meta.shape, dtype=torch.bfloat16)
        if "norm" not in name:
            drawn = torch.empty(meta.shape, dtype=torch.bfloat16, device=device)
            tensor = drawn.normal_(0, 0.02, generator=source).cpu()
        shards[-1][name] = tensor
        used += tensor.nbytes
    names = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        names.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


if __name__ == "__main__":
    numbers = sys.argv[2:]
    if len(numbers) not in (1, 2) or not all(number.isdigit() for number in numbers):
        sys.exit(__doc__)
    write(Path(sys.argv[1]), *map(int, numbers))
