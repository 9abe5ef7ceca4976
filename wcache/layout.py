"""The parallel layout: which ranks live on this node, and what each one holds. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from wcache.errors import NoSuchRankError


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """What one rank is in each dimension, and its place on its node."""

    rank: int
    """Global rank, unique over all nodes."""
    tp_rank: int
    pp_rank: int
    dp_rank: int
    ep_rank: int
    node_rank: int
    local_rank: int
    """Index of its device among those of its node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Sizes of the dimensions; ranks are numbered with tp fastest, then pp, then dp.

    That is the order in which SGLang and vLLM number theirs. Expert parallelism regroups the tp and
    dp ranks of a pipeline stage and so adds no ranks of its own: ``ep`` divides ``tp * dp``.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    nnodes: int = 1
    node_rank: int = 0

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nnodes

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields (field, what is wrong with it); nothing when the layout can be used."""
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": self.ep, "nnodes": self.nnodes}
        bad = [name for name, size in sizes.items() if size < 1]
        for name in bad:
            yield name, f"is {sizes[name]}, must be at least 1"
        if bad:
            return
        if (self.tp * self.dp) % self.ep:
            yield "ep", f"is {self.ep}, must divide tp * dp = {self.tp * self.dp}"
        if self.world_size % self.nnodes:
            yield "nnodes", f"is {self.nnodes}, must divide the {self.world_size} ranks"
        if not 0 <= self.node_rank < self.nnodes:
            yield "node_rank", f"is {self.node_rank}, must be between 0 and {self.nnodes - 1}"

    def local_ranks(self) -> range:
        """Global ranks that live on this node."""
        first = self.node_rank * self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    def coordinates(self, rank: int) -> Coordinates:
        """Raises :class:`NoSuchRankError` when there is no such rank in the whole layout."""
        if not 0 <= rank < self.world_size:
            raise NoSuchRankError(
                f"there is no rank {rank}", hint=f"ranks are 0 to {self.world_size - 1}"
            )
        tp_rank = rank % self.tp
        dp_rank = rank // (self.tp * self.pp)
        # Experts are spread over the tp * dp ranks of a stage, dp-major as in SGLang and vLLM.
        stage_rank = dp_rank * self.tp + tp_rank
        return Coordinates(
            rank=rank,
            tp_rank=tp_rank,
            pp_rank=rank // self.tp % self.pp,
            dp_rank=dp_rank,
            ep_rank=stage_rank * self.ep // (self.tp * self.dp),
            node_rank=rank // self.ranks_per_node,
            local_rank=rank % self.ranks_per_node,
        )
