"""Two models whose FP8 weights are multiplied out, so that they compute without FP8 kernels."""

import importlib.util
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from wcache.errors import WcacheError

if TYPE_CHECKING:
    import torch
    import transformers


def multiply_out(model: "transformers.PreTrainedModel") -> list[str]:
    """Gives ``model`` ordinary linear layers for its FP8 ones; returns the names of their weights.

    What the weights stand for, ``weight * scale``, is rounded to the dtype of the embedding, as
    transformers rounds a checkpoint that it loads with ``dequantize=True``.
    """
    import torch
    from transformers.integrations.finegrained_fp8 import FP8Linear

    from wcache.load.quantize import dequantized

    dtype = _dtype(model)
    names = []
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, FP8Linear):
            continue
        weight = dequantized(layer.weight, layer.weight_scale_inv, dtype)
        with torch.device("meta"):
            plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
        plain.weight = torch.nn.Parameter(weight, requires_grad=False)
        plain.bias = layer.bias
        model.set_submodule(name, plain)
        names.append(f"{name}.weight")
    return names


def from_fp8_checkpoint(kind: Any, folder: Path, **options: Any) -> Any:
    """``kind.from_pretrained`` that multiplies an FP8 checkpoint out, by transformers' own code.

    Raises :class:`WcacheError` when transformers lacks the library that it loads those with.
    """
    import transformers

    if importlib.util.find_spec("accelerate") is None:
        raise WcacheError("it loads FP8 checkpoints with accelerate, which is not installed")
    settings = transformers.FineGrainedFP8Config(dequantize=True)
    return kind.from_pretrained(folder, quantization_config=settings, **options)


def round_as_fp8(model: "transformers.PreTrainedModel", names: Collection[str]) -> None:
    """Replaces the weights ``names`` by what is left of them in FP8, quantized by transformers."""
    import transformers
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    from wcache.load.quantize import dequantized

    holder = SimpleNamespace(quantization_config=transformers.FineGrainedFP8Config())
    quantize: Any = Fp8Quantize(holder)  # type: ignore[no-untyped-call]  # transformers'
    parameters = dict(model.named_parameters())
    for name in names:
        parameter = parameters[name]
        found = quantize.convert({"x.weight": parameter.data})
        parameter.data = dequantized(found["x.weight"], found["x.weight_scale_inv"], _dtype(model))


def _dtype(model: "transformers.PreTrainedModel") -> "torch.dtype":
    embedding: Any = model.get_input_embeddings()  # typed as any module
    dtype: torch.dtype = embedding.weight.dtype
    return dtype
