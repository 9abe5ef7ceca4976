"""The places of a module tree that hold tensors, by dotted name."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

SlotKind = Literal["parameter", "buffer"]

# Exact types: a subclass may mean more than its value.
PLAIN_TYPES = frozenset({type(None), bool, int, float, str, list, tuple, dict})
# The registries and hooks that make a module what it is.
_MODULE_STATE = frozenset(vars(torch.nn.Module()))


@dataclass(frozen=True, slots=True)
class Slot:
    """An attribute of a module that holds a tensor, or could."""

    owner: torch.nn.Module
    leaf: str

    @property
    def kind(self) -> SlotKind | None:
        """How the module knows it; None for a plain attribute, there or not."""
        if self.owner._parameters.get(self.leaf) is not None:
            return "parameter"
        return "buffer" if self.leaf in self.owner._buffers else None

    @property
    def value(self) -> torch.Tensor | None:
        """The tensor that is there now."""
        match self.kind:
            case "parameter":
                return self.owner._parameters[self.leaf]
            case "buffer":
                return self.owner._buffers[self.leaf]
        there = vars(self.owner).get(self.leaf)
        return there if isinstance(there, torch.Tensor) else None


class Tree:
    """A module and all modules in it, by name.

    Names are looked up here and nowhere else, so that none can lead out of the module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        # A module that is in the tree twice has two names.
        self._owners = dict(module.named_modules(remove_duplicate=False))

    def slot(self, name: str) -> Slot | None:
        """None when no module has that name."""
        path, _, leaf = name.rpartition(".")
        owner = self._owners.get(path)
        return None if owner is None else Slot(owner, leaf)

    def tensors(self) -> Iterator[tuple[str, Slot]]:
        """Every parameter, buffer and plain tensor attribute, under each of its names."""
        for path, owner in self._owners.items():
            attributes = [k for k, v in vars(owner).items() if isinstance(v, torch.Tensor)]
            for leaf in (*owner._parameters, *owner._buffers, *attributes):
                yield f"{path}.{leaf}" if path else leaf, Slot(owner, leaf)


def is_settable(owner: torch.nn.Module, leaf: str, *, allow_tensor: bool) -> bool:
    """False where a manifest would replace code, a child, or a module's own registries.

    ``allow_tensor``: a tensor that is there already may be replaced too.
    """
    if not leaf or leaf.startswith("__") or leaf in _MODULE_STATE:
        return False
    if leaf in owner._modules or leaf in owner._parameters or leaf in owner._buffers:
        return False
    of_class = inspect.getattr_static(type(owner), leaf, None)
    if type(of_class) not in PLAIN_TYPES:
        return False
    there = vars(owner).get(leaf)
    return type(there) in PLAIN_TYPES or (allow_tensor and isinstance(there, torch.Tensor))
