"""An engine for the demo: answers prompts with a model from the map, or from disk.

    python scripts/demo_engine.py MODEL [--disk] [--serve]

Prints one JSON line with the tokens of every prompt. With --serve it goes on generating, prints a
line for each further round, and ends when its standard input does.
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


def main(model_folder: Path, *, disk: bool, serve: bool) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    began = time.perf_counter()
    if disk:
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="auto")
        seen = {}
    else:
        from wcache.engines.transformers import from_cache

        model = from_cache()
        attachment = model.wcache_attachment
        seen = {"generation": attachment.generation, "lease": attachment.lease_state}
    ready_s = time.perf_counter() - began

    def answer() -> list[list[int]]:
        rounds = []
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            with torch.no_grad():
                out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
            rounds.append(out[0].tolist())
        return rounds

    tokens = answer()
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens]
    say(round=0, ready_s=ready_s, tokens=tokens, texts=texts, pid=os.getpid(), **seen)
    number = 0
    while serve and not select.select([sys.stdin], [], [], 0)[0]:
        number += 1
        same = answer() == tokens
        say(round=number, same=same, lease=model.wcache_attachment.lease_state)


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    folders = [word for word in sys.argv[1:] if not word.startswith("--")]
    if len(folders) != 1:
        sys.exit(__doc__)
    main(Path(folders[0]), disk="--disk" in sys.argv, serve="--serve" in sys.argv)
