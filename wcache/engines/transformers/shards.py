"""Models whose layers are spread over processes: what each holds, and what they exchange.

Both follow from transformers' tensor-parallel plan of the model, read as data by what cuts a
checkpoint for its ranks (:mod:`wcache.load.placement`). What transformers itself does with a plan
changes from release to release, wraps every parameter, and in some needs accelerate beside it; here
parameters stay views of the map, and a forward of a linear layer or an embedding is followed by one
exchange at most.
"""

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
import transformers

from wcache import fp8
from wcache.checkpoint.ties import HEAD
from wcache.engines.transformers.group import Group
from wcache.errors import CheckpointError, UsageError, WcacheError
from wcache.load.parallel import HINT_PUBLISH, plan_of
from wcache.load.placement import Shards, cut_dimension, generic
from wcache.load.plan import sliced_shape
from wcache.manifest import Manifest

Rules = Mapping[str, str]
"""Style by module, with layer numbers as ``*``."""


def cut(model: "transformers.PreTrainedModel", manifest: Manifest, group: Group) -> Rules:
    """Gives the parameters of ``model``, on the meta device, the shapes of this rank's shards.

    Returns the rules that they were cut by. Raises :class:`CheckpointError` when transformers has
    no plan for the model or one that wcache can not apply, and :class:`WcacheError` for a tensor
    that is cached in another shape than the plan gives it.
    """
    names = {tensor.name for tensor in manifest.tensors}
    plan = plan_of(model.config, type(model))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = _tied_embedding(manifest, parameters)
    shards = Shards.of(plan, names, group.size, group.rank, tied)
    made: dict[int, torch.nn.Parameter] = {}
    for tensor in manifest.tensors:
        whole = parameters.get(tensor.name)
        if whole is None:
            continue
        wanted = _shape(shards, tensor.name, tied, parameters)
        if wanted != tuple(tensor.shape):
            raise WcacheError(
                f"{tensor.name} is cached as {list(tensor.shape)}, and by the plan of transformers"
                f" {transformers.__version__} rank {group.rank} of {group.size} has {list(wanted)}",
                hint="load it again with the transformers of this environment: wcache warm",
            )
        made[id(whole)] = torch.nn.Parameter(
            torch.empty(wanted, dtype=whole.dtype, device="meta"), requires_grad=False
        )
    for name, whole in parameters.items():
        if (shard := made.get(id(whole))) is not None:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path).register_parameter(leaf, shard)
    return {**shards.rules, **_head_rule(shards.rules, tied)}


def _head_rule(rules: Rules, tied: str | None) -> dict[str, str]:
    """The output head's, where the plan leaves it to its embedding or leaves the logits apart."""
    head = HEAD.rpartition(".")[0]
    if rules.get(head) == "colwise":
        return {head: "colwise_gather_output"}
    if head in rules or tied is None:
        return {}
    embedding = rules.get(generic(tied).rpartition(".")[0], "replicate")
    by_dimension: Mapping[object, str] = {0: "colwise_gather_output", 1: "rowwise_split_input"}
    found = by_dimension.get(cut_dimension(embedding))
    return {} if found is None else {head: found}


def _tied_embedding(manifest: Manifest, parameters: Mapping[str, torch.nn.Parameter]) -> str | None:
    """The embedding that the output head is the same tensor as; None when they are apart."""
    for tensor in manifest.tensors:
        if tensor.name == HEAD:
            return tensor.tied_to
    head = parameters.get(HEAD)
    same = (name for name, one in parameters.items() if one is head and name != HEAD)
    return next(same, None) if head is not None else None


def _shape(
    shards: Shards, name: str, tied: str | None, parameters: Mapping[str, torch.nn.Parameter]
) -> tuple[int, ...]:
    """Of this rank's part of parameter ``name``; the scales of an FP8 weight follow the weight."""
    if name == HEAD and tied is not None:
        name = tied
    weight = fp8.weight_name(name)
    if weight is not None and weight in parameters:
        return fp8.grid(_shape(shards, weight, tied, parameters))
    shape = tuple(parameters[name].shape)
    return sliced_shape(shape, shards.slice(name, shape))


def connect(model: "transformers.PreTrainedModel", rules: Rules, group: Group) -> None:
    """Has every module that ``rules`` name exchange what it must with the other ranks.

    Raises :class:`CheckpointError` for a style that is about more than weights.
    """
    for path, module in model.named_modules():
        style = rules.get(generic(path))
        if style is None:
            continue
        forward = _forward_for(path, module, style)
        if forward is not None:
            loose: Any = module
            loose.wcache_group = group
            loose.forward = MethodType(forward, module)
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # for gradients alone, and it may be another rank's row
    whole: Any = model
    # By it generation makes static caches for this rank's heads alone.
    whole._tp_size = group.size
    whole.save_pretrained = _refuse_to_save


def _refuse_to_save(*_: object, **__: object) -> None:
    raise UsageError(
        "this process holds one shard of the model, which is no model to save",
        hint="the checkpoint that it was loaded from has all of it",
    )


# --- forwards ---------------------------------------------------------------------------------

# Bound to their modules, so that a copy of a module computes with its own weights.
Forward = Callable[..., torch.Tensor]


def _forward_for(path: str, module: torch.nn.Module, style: str) -> Forward | None:
    """None where a module computes with its shard as it is, or with a whole weight."""
    if style in ("replicate", "replicated_with_grad_allreduce"):
        return None
    if isinstance(module, torch.nn.Embedding) and module.max_norm is None:
        # A tied embedding may have the rule of the output head.
        dimension = cut_dimension(style)
        if dimension in (0, 1):
            return _own_rows if dimension == 0 else _own_columns
    elif isinstance(module, torch.nn.Linear) and style in _LINEAR:
        return _LINEAR[style]
    raise CheckpointError(
        f"the tensor-parallel plan of transformers {transformers.__version__} has {style!r} for"
        f" {path}, a {type(module).__name__}, which wcache can not run on several processes",
        hint=HINT_PUBLISH,
    )


def _kept(module: Any) -> Group:
    group: Group = module.wcache_group
    return group


def _gathered(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """``hidden`` is whole, the weight has this rank's outputs: [..., in] to [..., out]."""
    return _kept(module).gather(type(module).forward(module, hidden))


def _summed(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """``hidden`` and the weight have this rank's inputs: [..., in / tp] to [..., out]."""
    bias = module._parameters.get("bias")
    if bias is None:
        return _kept(module).sum(type(module).forward(module, hidden))
    # Added once, after the sum, and not by every rank.
    module._parameters["bias"] = None
    try:
        part = type(module).forward(module, hidden)
    finally:
        module._parameters["bias"] = bias
    return _kept(module).sum(part) + bias


def _split_and_summed(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """``hidden`` is whole, the weight has this rank's inputs: [..., in] to [..., out]."""
    return _summed(module, _kept(module).part_of(hidden))


def _own_rows(module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The weight has a range of the vocabulary: int[...] to [..., width]."""
    group, rows = _kept(module), module.get_parameter("weight").shape[0]
    local = ids - group.rank * rows
    elsewhere = (local < 0) | (local >= rows)
    found = type(module).forward(module, local.masked_fill(elsewhere, 0))
    return group.sum(found.masked_fill(elsewhere.unsqueeze(-1), 0))


def _own_columns(module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The weight has a part of every token's vector: int[...] to [..., width]."""
    return _kept(module).gather(type(module).forward(module, ids))


_LINEAR: Mapping[str, Forward | None] = {
    "colwise": None,
    "colwise_rep": _gathered,
    "colwise_gather_output": _gathered,
    "rowwise": _summed,
    "rowwise_rep": _split_and_summed,
    "rowwise_split_input": _split_and_summed,
}
