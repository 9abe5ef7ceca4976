"""vLLM's own loading from disk: as it is, for the fallback, and watched, for what is published."""

import copy
from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from wcache.engines.vllm.python_state import changed, plain_state
from wcache.errors import UsageError


def disk_config(load_config: Any) -> Any:
    """A copy of ``load_config`` for vLLM's own loader; the given one is shared, and stays."""
    own = copy.copy(load_config)
    own.load_format = "auto"
    return own


def spare_cpu_weights(model: torch.nn.Module) -> None:
    """Has a CPU engine compute with weights as they are, instead of packing a copy of each.

    vLLM packs a linear layer's weight into memory that only a closure knows of, and drops the
    weight: such a model has nothing left that could be shared. Raises :class:`UsageError` for a
    layer whose packing can not be left out.
    """
    for name, module in model.named_modules():
        if not isinstance(getattr(module, "quant_method", None), UnquantizedLinearMethod):
            continue
        if module.weight.ndim != 2:  # convolutions are packed in place, and by every process anew
            raise UsageError(
                f"{name} is packed by vllm's CPU kernels and can not be shared",
                hint="start the engine without wcache (wcache run --mode off)",
            )
        # The switch by which vLLM's own MLA layers ask for the same.
        module._cpu_skip_gemm_dispatch = True


class WatchedLoader(DefaultModelLoader):  # type: ignore[misc]  # vllm has no types here
    """vLLM's default loader, which remembers what loading did to Python objects."""

    def __init__(self, load_config: Any, device_type: str) -> None:
        super().__init__(disk_config(load_config))
        self._device_type = device_type
        self._before: dict[str, Any] = {}

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Called by ``load_model`` when the model is built, and before it is post-processed."""
        if self._device_type == "cpu":
            spare_cpu_weights(model)
        self._before = plain_state(model)
        super().load_weights(model, model_config)

    def extras(self, model: torch.nn.Module) -> dict[str, Any]:
        """What of ``model``, loaded by this loader, is new or different since it was built."""
        return changed(self._before, plain_state(model))
