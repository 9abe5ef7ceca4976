"""A transformers model whose parameters are given weights, without a copy."""

import time
from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers

from wcache.client import Attachment
from wcache.client.bind import bind
from wcache.engines.transformers import shards
from wcache.engines.transformers.buffers import compute_buffers, tie_equal
from wcache.engines.transformers.fp8 import use_fp8_linears
from wcache.engines.transformers.group import ALONE, Group
from wcache.engines.transformers.names import first, named_as_in
from wcache.engines.transformers.source import Source
from wcache.engines.transformers.weights import Weights
from wcache.errors import CheckpointError, UsageError, WcacheError
from wcache.fingerprint import Fingerprint
from wcache.fp8 import weight_name
from wcache.manifest import Manifest
from wcache.memory.dtypes import TORCH_DTYPES

Told = Callable[[str, float], None]


def model_of(
    attachment: Attachment,
    config: str | Path | None = None,
    *,
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    **config_overrides: Any,
) -> "transformers.PreTrainedModel":
    """A model in eval mode over weights that are attached already; it keeps ``attachment``.

    The arguments are those of :func:`from_cache`. Raises :class:`CheckpointError` for a
    configuration that is not there or not known to transformers, and :class:`WcacheError` when the
    weights are not those of the model or are one rank's shard of them.
    """
    check_is_whole(attachment.fingerprint, 1)
    check_device(attachment.device, device)
    source = Source.of(config, attachment.fingerprint)
    model = build(
        attachment, source, attn_implementation=attn_implementation, overrides=config_overrides
    )
    keep(model, attachment)
    return model


def keep(model: Any, attachment: Attachment | None) -> None:
    """The lease lasts as long as the model does; None for a model without one."""
    model.wcache_attachment = attachment


def check_is_whole(fingerprint: Fingerprint, tp: int) -> None:
    """Raises :class:`WcacheError` for a shard of a model that ``tp`` processes can not run."""
    for name, size in (("tp_size", tp), ("pp_size", 1), ("ep_size", 1)):
        held = getattr(fingerprint, name)
        if held is not None and held > 1 and held != size:
            raise WcacheError(
                f"rank holds a shard of a model ({name} {held}), and transformers needs all of it",
                hint="load the model with --tp 1 into an instance of its own",
            )


def check_device(held: torch.device, wanted: str | torch.device | None) -> None:
    """Raises :class:`UsageError` when the weights lie elsewhere than they are wanted."""
    if wanted is None:
        return
    asked = torch.device(wanted)
    if asked.type != held.type or asked.index not in (None, held.index):
        raise UsageError(f"weights are cached on {held}, {asked} was asked for")


def build(
    weights: Weights,
    source: Source,
    *,
    group: Group = ALONE,
    attn_implementation: str | None = None,
    overrides: dict[str, Any] | None = None,
    told: Told = lambda _step, _seconds: None,
) -> "transformers.PreTrainedModel":
    """The model of ``source`` over ``weights``, this process's shard of it in a larger ``group``.

    ``told`` gets (step, seconds) for ``build`` and ``bind``.
    """
    begun = time.perf_counter()
    config = source.config(dict(overrides or {}))
    fingerprint = weights.manifest.fingerprint
    kind = model_class(config, fingerprint.architecture)
    model = _without_content(kind, config, weights.manifest, attn_implementation)
    built = time.perf_counter()
    told("build", built - begun)
    use_fp8_linears(model, weights.manifest, weights.device)
    manifest, tensors = named_as_in(model, weights)
    # Before anything is cut: what initializes a model knows it whole.
    compute_buffers(model, manifest, weights.device)
    rules = shards.cut(model, manifest, group) if group.size > 1 else {}
    bind(model, manifest, tensors)
    tie_equal(model)
    copied = [name for name, p in model.named_parameters() if not weights.holds(p)]
    if copied:
        raise WcacheError(f"parameters were copied out of the map: {first(copied)}")
    if rules:
        shards.connect(model, rules, group)
    if model.can_generate() and (generation := source.generation_config()) is not None:
        model.generation_config = generation
    loose: Any = model  # what transformers types only in part
    loose.eval()
    told("bind", time.perf_counter() - built)
    return model


def model_class(
    config: "transformers.PreTrainedConfig", architecture: str | None = None
) -> type["transformers.PreTrainedModel"]:
    """The class of ``architecture``, or else of the first one that ``config`` names.

    Raises :class:`CheckpointError` when transformers has none.
    """
    name = architecture or next(iter(getattr(config, "architectures", None) or ()), None)
    kind = getattr(transformers, name, None) if name else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CheckpointError(
            f"transformers {transformers.__version__} has no model {name!r}",
            hint="models that bring code of their own are not supported",
        )
    return kind


def _without_content(
    kind: type["transformers.PreTrainedModel"],
    config: "transformers.PreTrainedConfig",
    manifest: Manifest,
    attn_implementation: str | None,
) -> "transformers.PreTrainedModel":
    """Every parameter and buffer on the meta device."""
    options: dict[str, Any] = {"dtype": _main_dtype(manifest)}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    # What the Auto classes' from_config calls for the class that they chose.
    make: Callable[..., transformers.PreTrainedModel] = kind._from_config
    with torch.device("meta"):
        return make(config, **options)


def _main_dtype(manifest: Manifest) -> torch.dtype:
    """The floating dtype of most bytes, as what the model computes with between its weights."""
    nbytes: Counter[torch.dtype] = Counter()
    for tensor in manifest.tensors:
        dtype = TORCH_DTYPES[tensor.dtype]
        is_scale = weight_name(tensor.name) is not None
        if dtype.is_floating_point and dtype.itemsize > 1 and not (is_scale or tensor.tied_to):
            nbytes[dtype] += prod(tensor.shape) * dtype.itemsize
    return nbytes.most_common(1)[0][0] if nbytes else torch.get_default_dtype()
