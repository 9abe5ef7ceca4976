"""Which weights of a checkpoint transformers would quantize to FP8: those of linear layers."""

import functools
from collections.abc import Mapping
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


def quantizable(checkpoint: Checkpoint) -> frozenset[str]:
    """Names of the weights that ``--quantization fp8`` quantizes.

    They are those of linear layers and experts, but for the output head, tied weights and what the
    model asks to be kept in float32, as FineGrainedFP8 of transformers has it; of these the ones
    whose dimensions are multiples of 128, while the rest keeps its dtype. transformers is asked for
    them with a model on the meta device, where it takes no memory.

    Raises :class:`CheckpointError` when transformers is not there, does not know the model, or
    calls the layers other names than the checkpoint.
    """
    architecture = checkpoint.config.architecture
    linears, experts, prefix = _layers(checkpoint.path, architecture, checkpoint.config.data)
    found: set[str] = set()
    met: set[str] = set()
    for name, entry in checkpoint.tensors.items():
        layer = _layer_of(name, linears, experts, prefix)
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
    if absent := sorted({*linears, *experts} - met):
        raise CheckpointError(
            f"transformers quantizes {absent[0]} of {architecture}, which the checkpoint does not"
            " have under that name",
            hint=HINT_AUTO,
        )
    return frozenset(found)


def _layer_of(
    name: str, linears: frozenset[str], experts: frozenset[str], prefix: str
) -> str | None:
    """The layer that ``name`` is the weight of; a bare model's names have no prefix."""
    for choice in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        module, _, leaf = choice.rpartition(".")
        if leaf == "weight" and module in linears:
            return module
        # experts.3.up_proj.weight as files have it, experts.gate_up_proj as transformers does.
        for group in (module, module.rpartition(".")[0].rpartition(".")[0]):
            if group in experts and not leaf.endswith("bias"):
                return group
    return None


@functools.lru_cache(maxsize=2)  # up plans every rank of a model
def _layers(
    path: Path,
    architecture: str | None,
    config_json: bytes,  # noqa: ARG001  # a part of the cache's key
) -> tuple[frozenset[str], frozenset[str], str]:
    """Names of the linear layers and groups of experts to quantize, and of the base model.

    ``config_json`` is what is in ``path``, so that a changed file is looked at again.
    """
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
    prefix = str(model.base_model_prefix)
    return _named(modules, FP8Linear), _named(modules, FP8Experts), prefix


def _named(modules: Mapping[str, Any], kind: type) -> frozenset[str]:
    return frozenset(name for name, module in modules.items() if isinstance(module, kind))
