"""Puts the shards of every rank together and compares them with the checkpoint, bit by bit."""

from pathlib import Path

import torch
from safetensors import safe_open

import wcache


def compare(checkpoint: Path, *, tp: int, instance: str) -> tuple[int, int]:
    """Returns how many tensors there are and how many are split; raises if one bit differs."""
    ranks = [wcache.attach(rank=rank, instance=instance) for rank in range(tp)]
    count = split = 0
    with safe_open(checkpoint / "model.safetensors", framework="pt") as disk:
        for name in disk.keys():  # noqa: SIM118  # safe_open is no mapping
            whole = disk.get_tensor(name)
            shards = [rank.tensors[name] for rank in ranks]
            if shards[0].shape == whole.shape:
                joined = shards[0]
                assert all(torch.equal(shard, joined) for shard in shards), name
            else:
                split += 1
                dims = zip(shards[0].shape, whole.shape, strict=True)
                dim = next(dim for dim, (part, all_) in enumerate(dims) if part != all_)
                joined = torch.cat(shards, dim)
            assert joined.dtype == whole.dtype, name
            assert torch.equal(joined, whole), name
            count += 1
    del shards, joined, whole
    for rank in ranks:
        rank.close()
    return count, split
