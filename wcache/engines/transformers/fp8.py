"""Gives a transformers model the FP8 linear layers that the cached weights are for."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers.integrations.finegrained_fp8 import FP8Linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from wcache import gate
from wcache.errors import WcacheError
from wcache.fp8 import ON_LOAD, WEIGHT_DTYPE, scale_name
from wcache.manifest import Manifest

log = logging.getLogger(__name__)


def use_fp8_linears(
    model: "transformers.PreTrainedModel", manifest: Manifest, device: torch.device
) -> None:
    """Replaces each linear layer of ``model``, which is on the meta device, whose weight is FP8.

    The manifest decides and not the configuration: a layer whose dimensions are no multiples of
    128 may have been kept in its dtype. ``device`` is where the weights are. The model is marked as
    quantized, as ``from_pretrained`` marks one.

    Raises :class:`WcacheError` when configuration and cached weights contradict each other, and
    :class:`wcache.errors.UnsupportedQuantForIPCError` for a method that can not be kept.
    """
    config: Any = model.config
    told = _settings(getattr(config, "quantization_config", None))
    if told is not None:
        gate.check_settings(told, f"the configuration of {type(model).__name__}")
    dtypes = {tensor.name: tensor.dtype for tensor in manifest.tensors}
    weights = [
        name
        for name, dtype in dtypes.items()
        if dtype == WEIGHT_DTYPE and scale_name(name) in dtypes
    ]
    if not weights:
        if told is not None:
            raise WcacheError(
                f"the configuration says that {type(model).__name__} is quantized, the cached"
                " weights are not",
                hint="name the checkpoint that the weights were loaded from: from_cache(config=…)",
            )
        return
    told = told or ON_LOAD
    if told.get("scale_fmt", "float") != "float":
        raise WcacheError(
            f"{type(model).__name__} has scales of the format {told['scale_fmt']!r}, which"
            " transformers would read in another dtype than they are cached in",
        )
    if device.type == "cpu":
        log.warning(
            "%d layers of %s are FP8, which transformers computes with on a GPU only",
            len(weights),
            type(model).__name__,
        )
    settings = transformers.FineGrainedFP8Config(**told)
    for weight in weights:
        _replace(model, weight, settings)
    loose: Any = model  # what transformers sets after loading, and types only in part
    loose.is_quantized = True
    loose.quantization_method = settings.quant_method
    loose.hf_quantizer = FineGrainedFP8HfQuantizer(settings, pre_quantized=True)
    config.quantization_config = settings


def _settings(found: Any) -> Mapping[str, Any] | None:
    if found is None or isinstance(found, Mapping):
        return found
    return dict(found.to_dict())


def _replace(model: "transformers.PreTrainedModel", weight: str, settings: Any) -> None:
    """A weight that belongs to no linear layer is left to the comparison of names."""
    prefix = f"{model.base_model_prefix}."
    modules = dict(model.named_modules())
    path = weight.removesuffix(".weight")
    for name in (path, prefix + path, path.removeprefix(prefix)):
        old = modules.get(name)
        if type(old) is torch.nn.Linear:
            with torch.device("meta"):
                new = FP8Linear(
                    in_features=old.in_features,
                    out_features=old.out_features,
                    block_size=settings.weight_block_size,
                    activation_scheme=settings.activation_scheme,
                    has_bias=old.bias is not None,
                )
            model.set_submodule(name, new)
            return
