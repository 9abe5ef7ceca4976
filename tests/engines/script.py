"""A script over cached weights: answers prompts again and again, or writes logits.

usage: script.py MODEL [FOLDER]; without FOLDER it prints the tokens of every prompt as a line of
JSON until its input ends, with FOLDER it leaves there the logits of a fixed prompt.
"""

import json
import os
import select
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

import wcache
from tests.engines.serving import PROMPTS
from wcache.engines.transformers import from_cache

NEW_TOKENS = 8


def prompts(folder: Path) -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text).input_ids for text in PROMPTS]


def answers(model: Any, asked: list[list[int]]) -> list[list[int]]:
    """Greedy completions."""
    found = []
    for prompt in asked:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        found.append(made[0, len(prompt) :].tolist())
    return found


def logits(model: Any, asked: list[list[int]]) -> torch.Tensor:
    """float[tokens, vocabulary] of the longest prompt."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([max(asked, key=len)])).logits[0]
    return found.contiguous()


def main(folder: Path, out: Path | None) -> None:
    torch.set_num_threads(1)
    asked = prompts(folder)
    model = from_cache(folder)
    if out is not None:
        found = {"logits": logits(model, asked)}
        wcache.first_token()
        save_file(found, out / f"{os.environ['RANK']}.safetensors")
        return
    first = True
    while first or not select.select([sys.stdin], [], [], 0)[0]:
        print(json.dumps(answers(model, asked)), flush=True)
        if first:
            wcache.first_token()
        first = False


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
