"""The plain Python values that loading and post-processing leave on a vLLM model's modules."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

import msgspec
import torch

from wcache.client.extras import find_extras
from wcache.client.slots import PLAIN_TYPES, Tree, is_settable

State = Mapping[str, Any]

# Values by which an engine keeps itself from doing twice what an engine that attaches does once.
_OWN = frozenset({"training", "_already_called_process_weights_after_loading"})


def plain_state(model: torch.nn.Module) -> dict[str, Any]:
    """Every value of a module that JSON carries as it is, by its dotted name."""
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, value in vars(module).items():
            if leaf in _OWN or not is_settable(module, leaf, allow_tensor=False):
                continue
            if (kept := _as_json(value)) is not _NOTHING:
                found[f"{path}.{leaf}" if path else leaf] = kept
    return found


def changed(before: State, after: State) -> dict[str, Any]:
    """What is new or different in ``after``: what loading the weights did to Python objects."""
    return {
        name: value
        for name, value in after.items()
        if name not in before or before[name] != value or type(before[name]) is not type(value)
    }


def restore(model: torch.nn.Module, extras: State) -> None:
    """Sets ``extras``; raises :class:`wcache.errors.WcacheError` for a name that leads nowhere."""
    for extra in find_extras(Tree(model), extras, ()):
        extra.set()


_NOTHING = object()


def _as_json(value: Any) -> Any:
    """``value`` with lists for tuples, or :data:`_NOTHING` where it would not come back equal."""
    if type(value) not in PLAIN_TYPES or (isinstance(value, float) and not isfinite(value)):
        return _NOTHING
    if isinstance(value, tuple):
        value = list(value)
    try:
        read = msgspec.json.decode(msgspec.json.encode(value))
    except (TypeError, ValueError, RecursionError):
        return _NOTHING
    return read if read == value else _NOTHING
