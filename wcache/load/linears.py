"""Which weights of a checkpoint transformers would quantize to FP8: those of linear layers."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wcache.checkpoint import Checkpoint
from wcache.errors import CheckpointError
from wcache.fp8 import is_whole
from wcache.load.parallel import known_model

HINT_AUTO = "load it without --quantization fp8"
# What model code raises at a configuration that makes no sense to it.
_BUILD_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip
FLOATS = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True)
class Fp8Layers:
    """The layers of one architecture that FineGrainedFP8 of transformers would quantize.

    Those are linear layers and experts, but for the output head, tied weights and what the model
    asks to be kept in float32.
    """

    linears: frozenset[str]
    experts: frozenset[str]
    """Groups of experts, whose weights transformers has in one tensor."""
    prefix: str
    """Name of the base model in the whole model, ``model`` as a rule."""


def fp8_layers(checkpoint: Checkpoint) -> Fp8Layers:
    """Asks transformers, with a model on the meta device, where it takes no memory.

    Raises :class:`CheckpointError` when transformers is not there or does not know the model.
    """
    return _layers(checkpoint.path, checkpoint.config.architecture, checkpoint.config.data)


def quantizable(checkpoint: Checkpoint, layers: Fp8Layers) -> frozenset[str]:
    """Names of the weights that ``--quantization fp8`` quantizes.

    They are those of ``layers`` whose dimensions are multiples of 128; the rest keeps its dtype.
    Raises :class:`CheckpointError` when the checkpoint calls the layers other names.
    """
    found: set[str] = set()
    met: set[str] = set()
    for name, entry in checkpoint.tensors.items():
        layer = _layer_of(name, layers)
        if layer is None:
            continue
        met.add(layer)
        if entry.dtype not in FLOATS:
            raise CheckpointError(
                f"{checkpoint.path}: weight {name!r} is {entry.dtype}, which can not be quantized",
                hint=HINT_AUTO,
            )
        if len(entry.shape) != 2:
            raise CheckpointError(
                f"{checkpoint.path}: {name!r} holds several weights, {list(entry.shape)}, which"
                " wcache does not quantize",
                hint=HINT_AUTO,
            )
        if is_whole(entry.shape):
            found.add(name)
    if absent := sorted({*layers.linears, *layers.experts} - met):
        raise CheckpointError(
            f"transformers quantizes {absent[0]} of {checkpoint.config.architecture}, which the"
            " checkpoint does not have under that name",
            hint=HINT_AUTO,
        )
    return frozenset(found)


def _layer_of(name: str, layers: Fp8Layers) -> str | None:
    """The layer that ``name`` is the weight of; a bare model's names have no prefix."""
    prefix = f"{layers.prefix}."
    for choice in (name, prefix + name, name.removeprefix(prefix)):
        module, _, leaf = choice.rpartition(".")
        if leaf == "weight" and module in layers.linears:
            return module
        # experts.3.up_proj.weight as files have it, experts.gate_up_proj as transformers does.
        for group in (module, module.rpartition(".")[0].rpartition(".")[0]):
            if group in layers.experts and not leaf.endswith("bias"):
                return group
    return None


@functools.lru_cache(maxsize=2)  # up plans every rank of a model
def _layers(
    path: Path,
    architecture: str | None,
    config_json: bytes,  # noqa: ARG001  # a part of the cache's key
) -> Fp8Layers:
    """``config_json`` is what is in ``path``, so that a changed file is looked at again."""
    config, kind = known_model(path, architecture, HINT_AUTO)
    # Both are there by now, and heavy.
    import torch
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    try:
        with torch.device("meta"):
            model = kind._from_config(config)
        FineGrainedFP8HfQuantizer(FineGrainedFP8Config(), pre_quantized=False).preprocess_model(
            model
        )
    except _BUILD_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"{architecture} can not be built to see what is quantized of it: {reason[:200]}",
            hint=HINT_AUTO,
        ) from None
    modules: Mapping[str, Any] = dict(model.named_modules())
    return Fp8Layers(
        linears=_named(modules, FP8Linear),
        experts=_named(modules, FP8Experts),
        prefix=str(model.base_model_prefix),
    )


def _named(modules: Mapping[str, Any], kind: type) -> frozenset[str]:
    return frozenset(name for name, module in modules.items() if isinstance(module, kind))
