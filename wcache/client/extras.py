"""The plain Python values that post-processing left on modules and parameters, set again."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from wcache.client.slots import PLAIN_TYPES, Slot, Tree, is_settable
from wcache.errors import WcacheError


@dataclass(frozen=True, slots=True)
class Extra:
    """A value for an attribute of a module, or of a tensor in ``holder``."""

    holder: Slot | None
    owner: torch.nn.Module
    leaf: str
    value: Any

    def set(self) -> None:
        target = self.owner if self.holder is None else self.holder.value
        # JSON has no tuples, so a list that replaces one becomes one.
        was_tuple = isinstance(vars(target).get(self.leaf), tuple)
        is_list = isinstance(self.value, list)
        setattr(target, self.leaf, tuple(self.value) if was_tuple and is_list else self.value)


def find_extras(tree: Tree, extras: Mapping[str, Any], cached: Collection[str]) -> list[Extra]:
    """Where each value goes, by its dotted name; tensors that are ``cached`` will be there.

    Raises :class:`WcacheError` for a name that leads nowhere in the tree, or to anything but plain
    data: a manifest sets values, and never code.
    """
    found = []
    for name, value in extras.items():
        extra = _on_module(tree, name, value) or _on_tensor(tree, name, value, cached)
        if extra is None:
            raise WcacheError(f"{name[:200]} is no value that a manifest may set")
        found.append(extra)
    return found


def _on_module(tree: Tree, name: str, value: Any) -> Extra | None:
    slot = tree.slot(name)
    if slot is None or not is_settable(slot.owner, slot.leaf, allow_tensor=False):
        return None
    return Extra(None, slot.owner, slot.leaf, value)


def _on_tensor(tree: Tree, name: str, value: Any, cached: Collection[str]) -> Extra | None:
    path, _, leaf = name.rpartition(".")
    holder = tree.slot(path) if path else None
    if holder is None or not leaf or leaf.startswith("__"):
        return None
    tensor = holder.value
    if tensor is None and path not in cached:
        return None
    # Everything that a tensor's class has is torch's, or an engine's code.
    if hasattr(type(tensor) if tensor is not None else torch.Tensor, leaf):
        return None
    if tensor is not None and type(vars(tensor).get(leaf)) not in PLAIN_TYPES:
        return None
    return Extra(holder, holder.owner, leaf, value)
