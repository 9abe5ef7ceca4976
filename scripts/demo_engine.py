"""An engine for the demo: answers prompts with a model from the map, or from disk.

    python scripts/demo_engine.py MODEL [--disk[=DEVICE]] [--serve]

Prints one JSON line with the tokens of every prompt. With --serve it goes on generating, prints a
line for each further round, and ends when its standard input does. A checkpoint without a tokenizer
gets prompts of fixed token ids.
"""

import json
import os
import select
import sys
import time
from pathlib import Path

PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "The largest planet in our solar system is",
    "Once upon a time, in a small village",
]
NEW_TOKENS = 12


def main(folder: Path, *, disk: str | None, serve: bool) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Two engines share this machine in the demo: threads that wait for each other would crawl.
    torch.set_num_threads(1)
    named = (folder / "tokenizer.json").exists()
    tokenizer = AutoTokenizer.from_pretrained(folder) if named else None
    prompts = [tokenizer(text).input_ids if tokenizer else fixed_ids(text) for text in PROMPTS]
    if disk == "cuda":
        torch.zeros(1, device="cuda")  # the context is not a part of either load
    began = time.perf_counter()
    if disk is not None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(disk)
        seen = {}
    else:
        from wcache.engines.transformers import from_cache

        model = from_cache()
        attachment = model.wcache_attachment
        seen = {"generation": attachment.generation, "lease": attachment.lease_state}
    ready_s = time.perf_counter() - began

    def answer() -> list[list[int]]:
        rounds = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=model.device)
            with torch.no_grad():
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS,
                    do_sample=False, pad_token_id=0,
                )  # fmt: skip
            rounds.append(out[0].tolist())
        return rounds

    tokens = answer()
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens if tokenizer]
    say(round=0, ready_s=ready_s, tokens=tokens, texts=texts, pid=os.getpid(), **seen)
    number = 0
    while serve and not select.select([sys.stdin], [], [], 0)[0]:
        number += 1
        same = answer() == tokens
        say(round=number, same=same, lease=model.wcache_attachment.lease_state)


def fixed_ids(text: str) -> list[int]:
    return [100 + byte for byte in text.encode()]


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    folders = [word for word in sys.argv[1:] if not word.startswith("--")]
    flags = [word for word in sys.argv[1:] if word.startswith("--disk")]
    if len(folders) != 1:
        sys.exit(__doc__)
    where = (flags[0].partition("=")[2] or "cpu") if flags else None
    main(Path(folders[0]), disk=where, serve="--serve" in sys.argv)
