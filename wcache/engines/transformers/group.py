"""The processes that hold one model's shards together, and what they tell each other."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as distributed

from wcache.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The tensor-parallel neighbours of this process, itself among them."""

    rank: int
    """This process's place among them, which is the tp rank of its weights."""
    size: int
    handle: Any = None
    """Of torch.distributed; None for all processes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Group":
        # A copy of a model talks to the same processes.
        return self

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in the dtype of ``part``, which is used up."""
        _check_no_gradient(part)
        whole = part.contiguous()
        distributed.all_reduce(whole, group=self.handle)
        return whole

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks, in their order, side by side in the last dimension."""
        _check_no_gradient(part)
        own = part.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(parts, own, group=self.handle)
        return torch.cat(parts, dim=-1)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the last dimension."""
        width = whole.shape[-1] // self.size
        return whole.narrow(-1, self.rank * width, width)


ALONE = Group(rank=0, size=1)


def _check_no_gradient(part: torch.Tensor) -> None:
    """These operations have no backward: a gradient would be wrong without a word."""
    if part.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            "a model whose weights are spread over processes computes, and does not train",
            hint="run it under torch.no_grad(), or train with tp 1",
        )
