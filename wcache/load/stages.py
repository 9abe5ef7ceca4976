"""Which tensors each stage of a pipeline holds. Pure."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

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
    """The stages of a pipeline: their layers, and what goes before the first and after the last."""

    container: str
    """Name of the list of layers, with the dot behind it."""
    before: tuple[str, ...]
    """Modules that run before the layers, with the dot behind them."""
    after: tuple[str, ...]
    ends: tuple[int, ...]
    """The layer after the last one of each stage."""

    @classmethod
    def of(cls, parallel: ParallelPlan, names: set[str], pp: int) -> "Stages":
        """Raises :class:`CheckpointError` when there is no plan or it is not for these names."""
        if not parallel.stages:
            raise CheckpointError(
                f"pp {pp}: transformers has no pipeline-parallel plan for {parallel.architecture}",
                hint=HINT_PUBLISH,
            )
        prefix = parallel.prefix_in(names)
        modules = [f"{prefix}{module}." for module in parallel.stages]
        layers = {module: _layer_numbers(module, names) for module in modules}
        found = [module for module in modules if layers[module]]
        if len(found) != 1:
            raise CheckpointError(
                f"pp {pp}: {parallel.architecture} has {len(found)} lists of layers, not one",
                hint=HINT_PUBLISH,
            )
        container = found[0]
        numbers = layers[container]
        total = max(numbers) + 1
        if len(numbers) != total:
            missing = min(set(range(total)) - numbers)
            raise CheckpointError(f"the checkpoint has no tensor of layer {container}{missing}")
        if total < pp:
            raise CheckpointError(f"pp {pp}: the model has {total} layers, too few for the stages")
        place = modules.index(container)
        stages = cls(
            container=container,
            before=tuple(modules[:place]),
            after=(*modules[place + 1 :], *(f"{module}." for module in parallel.head_stages)),
            ends=tuple(accumulate(layers_per_stage(total, pp))),
        )
        stages._check_knows(names)
        return stages

    def stage_of(self, name: str) -> int:
        """The number of the stage that holds tensor ``name``."""
        number = _layer_number(self.container, name)
        if number is not None:
            return bisect_right(self.ends, number)
        return 0 if name.startswith(self.before) else len(self.ends) - 1

    def _check_knows(self, names: set[str]) -> None:
        known = (*self.before, *self.after)
        lost = [
            name
            for name in names
            if _layer_number(self.container, name) is None and not name.startswith(known)
        ]
        if lost:
            raise CheckpointError(
                f"the pipeline-parallel plan does not say on which stage {min(lost)!r} is",
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
