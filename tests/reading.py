"""What tests of reading share: memory of each kind, and a checkpoint to read into it."""

import threading

import torch

from wcache.checkpoint import Checkpoint
from wcache.layout import Layout
from wcache.load.placement import place
from wcache.memory.slab import Mapping


class Elsewhere:
    """Memory that can not be read into, as that of a GPU: everything goes through the ring."""

    def __init__(self, nbytes: int) -> None:
        self.content = torch.zeros(nbytes, dtype=torch.uint8)
        self.address = self.content.data_ptr()
        self.nbytes = nbytes

    def tensor(self) -> torch.Tensor:
        return self.content

    def close(self) -> None:
        pass


def many(count: int = 40) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {f"t{n}": torch.randn(50, 101, generator=generator) for n in range(count)}


def readers() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("wcache-read")]


def content_of(checkpoint: Checkpoint, mapping: Mapping) -> bool:
    """True when what :func:`many` made is all there."""
    expected, found = many(), mapping.tensor()
    return all(
        found[one.offset : one.offset + one.nbytes].equal(
            expected[one.name].view(-1).view(torch.uint8)
        )
        for one in place(checkpoint, Layout(), 0).targets
    )
