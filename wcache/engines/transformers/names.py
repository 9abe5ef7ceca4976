"""Cached tensors by the names that a transformers model knows them by."""

import re
from typing import TYPE_CHECKING

import msgspec
import torch

from wcache.engines.transformers.weights import Weights
from wcache.errors import WcacheError
from wcache.manifest import Manifest

if TYPE_CHECKING:
    import transformers

_NAMES_TOLD = 3
# What old checkpoints have and models compute themselves now; transformers passes over both.
_COMPUTED_NOW = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


def named_as_in(
    model: "transformers.PreTrainedModel", weights: Weights
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """The manifest and its tensors by the names that ``model`` knows them by.

    A checkpoint of a bare model has no prefix that a model with a head has, and the other way
    round; tensors that transformers passes over are left out.
    """
    manifest = weights.manifest
    known = _registered_names(model)
    prefix = model.base_model_prefix + "."
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), *_COMPUTED_NOW]
    is_ignored = re.compile("|".join(f"(?:{pattern})" for pattern in ignored)).search
    names: dict[str, str] = {}
    unknown: list[str] = []
    for tensor in manifest.tensors:
        old = tensor.name
        choices = (old, prefix + old, old.removeprefix(prefix))
        new = next((name for name in choices if name in known), None)
        if tensor.kind == "attribute":
            names[old] = old
        elif new is not None:
            names[old] = new
            known.remove(new)  # so that no second tensor takes it
        elif not is_ignored(old):
            unknown.append(old)
    if unknown:
        raise _other_names(model, unknown, names)
    tensors = {new: weights.tensors[old] for old, new in names.items()}
    return _renamed(manifest, names), tensors


def _registered_names(model: torch.nn.Module) -> set[str]:
    return {
        name
        for found in (
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
        for name, _ in found
    }


def _renamed(manifest: Manifest, names: dict[str, str]) -> Manifest:
    """``manifest`` with the tensors that ``names`` has, by their new names."""
    roots: dict[str, str] = {}
    tensors = []
    for tensor in manifest.tensors:
        if tensor.name not in names:
            continue
        new = names[tensor.name]
        # The first of those that are tied may have been left out, so the first that is kept counts.
        root = roots.setdefault(tensor.tied_to or tensor.name, new)
        tied_to = None if root == new else root
        tensors.append(msgspec.structs.replace(tensor, name=new, tied_to=tied_to))
    return msgspec.structs.replace(manifest, tensors=tuple(tensors))


def _other_names(model: torch.nn.Module, unknown: list[str], names: dict[str, str]) -> WcacheError:
    missing = sorted({name for name, _ in model.named_parameters()} - set(names.values()))
    message = f"{type(model).__name__} has no {first(unknown)}, which the cache has"
    if not missing:
        return WcacheError(message, hint="the checkpoint is of another architecture")
    return WcacheError(
        f"{message}; the cache has no {first(missing)}",
        hint="transformers renames or merges this checkpoint's tensors as it loads them, which"
        " wcache does not: publish the loaded model with wcache.publish",
    )


def first(names: list[str]) -> str:
    """The first few of ``names``, and how many more there are."""
    more = len(names) - _NAMES_TOLD
    return ", ".join(names[:_NAMES_TOLD]) + (f" and {more} more" if more > 0 else "")
