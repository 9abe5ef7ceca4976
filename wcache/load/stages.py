"""Which tensors each stage of a pipeline holds. Pure."""

from dataclasses import dataclass

from wcache.errors import CheckpointError
from wcache.load.parallel import HINT_PUBLISH, ParallelPlan


def layers_per_stage(layers: int, pp: int) -> list[int]:
    """How many of ``layers`` each of ``pp`` stages takes.

    Evenly; what is left over goes, one each, to the stages before the last one, from the back: the
    last stage has the output head to compute as well. That is vLLM's rule too
    (``get_pp_indices`` in vllm/distributed/utils.py), so 7 layers over 3 stages are 2, 3 and 2.
    """
    counts = [layers // pp] * pp
    for back in range(layers % pp):
        counts[-2 - back] += 1
    return counts


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stage of one rank: its layers, and what goes in front of the first and after the last."""

    container: str
    """Name of the list of layers, with the dot behind it."""
    before: tuple[str, ...]
    """Modules that run before the layers, with the dot behind them."""
    after: tuple[str, ...]
    layers: range
    is_first: bool
    is_last: bool

    @classmethod
    def of(cls, parallel: ParallelPlan, names: set[str], pp: int, pp_rank: int) -> "Stages":
        """Raises :class:`CheckpointError` when there is no plan or it is not for these names."""
        if not parallel.stages:
            raise CheckpointError(
                f"pp {pp}: transformers has no pipeline-parallel plan for {parallel.architecture}",
                hint=HINT_PUBLISH,
            )
        prefix = parallel.prefix_in(names)
        modules = [f"{prefix}{module}." for module in parallel.stages]
        found = [module for module in modules if _layer_numbers(module, names)]
        if len(found) != 1:
            raise CheckpointError(
                f"pp {pp}: {parallel.architecture} has {len(found)} lists of layers, not one",
                hint=HINT_PUBLISH,
            )
        container = found[0]
        numbers = _layer_numbers(container, names)
        total = max(numbers) + 1
        if len(numbers) != total:
            missing = min(set(range(total)) - numbers)
            raise CheckpointError(f"the checkpoint has no tensor of layer {container}{missing}")
        if total < pp:
            raise CheckpointError(f"pp {pp}: the model has {total} layers, too few for the stages")
        counts = layers_per_stage(total, pp)
        first = sum(counts[:pp_rank])
        place = modules.index(container)
        stages = cls(
            container=container,
            before=tuple(modules[:place]),
            after=(*modules[place + 1 :], *(f"{module}." for module in parallel.head_stages)),
            layers=range(first, first + counts[pp_rank]),
            is_first=pp_rank == 0,
            is_last=pp_rank == pp - 1,
        )
        stages._check_knows(names)
        return stages

    def holds(self, name: str) -> bool:
        number = _layer_number(self.container, name)
        if number is not None:
            return number in self.layers
        if name.startswith(self.before):
            return self.is_first
        return self.is_last

    def _check_knows(self, names: set[str]) -> None:
        for name in sorted(names):
            known = _layer_number(self.container, name) is not None
            if not known and not name.startswith((*self.before, *self.after)):
                raise CheckpointError(
                    f"the pipeline-parallel plan does not say on which stage {name!r} is",
                    hint=HINT_PUBLISH,
                )


def _layer_number(container: str, name: str) -> int | None:
    if not name.startswith(container):
        return None
    number = name[len(container) :].partition(".")[0]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 7 else None


def _layer_numbers(container: str, names: set[str]) -> set[int]:
    found = (_layer_number(container, name) for name in names)
    return {number for number in found if number is not None}
