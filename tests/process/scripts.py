"""A script that takes its model from the cache, as an operator's would.

usage: scripts.py MODEL [STATUS]; prints its tokens as a line of JSON, and ends with STATUS.
"""

import json
import os
import sys
from typing import Any

import torch

import wcache
from wcache.engines.transformers import from_cache


def main(folder: str, status: int) -> int:
    torch.set_num_threads(1)
    model: Any = from_cache(folder)
    ids = torch.arange(1, 9)[None]
    mask = torch.ones_like(ids)
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    print(json.dumps({"rank": os.environ.get("RANK"), "tokens": tokens.tolist()}), flush=True)
    wcache.first_token()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0))
