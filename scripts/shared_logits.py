"""Logits of a fixed prompt, of a model from disk or of one whose shards are cached.

    python scripts/shared_logits.py MODEL FILE.safetensors
    wcache run -- torchrun --nproc-per-node 2 scripts/shared_logits.py MODEL FOLDER

Alone it reads MODEL from disk, in float32; under torchrun each process takes its shard from the
cache and leaves what it got in FOLDER/RANK.safetensors. scripts/two_gpus.py compares the two.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import wcache
from wcache.engines.transformers import from_cache

PROMPT = [11, 7, 5, 3, 2, 101, 97, 89, 83, 79, 73, 71, 67, 61, 59, 53]


def main(folder: Path, out: Path) -> None:
    rank = os.environ.get("RANK")
    began = time.perf_counter()
    model: Any
    if rank is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    else:
        model = from_cache(folder)
        out = out / f"{rank}.safetensors"
    ready = time.perf_counter()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT], device=model.device)).logits[0].cpu().contiguous()
    if rank is not None:
        wcache.first_token()
    save_file({"logits": logits}, out)
    of = "" if rank is None else f" of rank {rank}"
    print(f"weights{of} on {model.device} after {ready - began:.2f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
