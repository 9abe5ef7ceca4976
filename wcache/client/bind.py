"""Binding: points a module that was built on the meta device at mapped weights."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from wcache.client.collector import collector_paused
from wcache.client.extras import find_extras
from wcache.client.private import private_copies
from wcache.client.slots import Slot, Tree, is_settable
from wcache.errors import WcacheError
from wcache.manifest import Manifest, Tensor

_NAMES_TOLD = 5

AllowMissing = Callable[[str], bool] | Collection[str]


def bind(
    module: torch.nn.Module,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    *,
    allow_missing: AllowMissing = (),
) -> None:
    """Gives ``module`` the weights of ``manifest``, whose mapped ``tensors`` go by name.

    Parameters become views of the map that keep the class and the attributes of the ones that
    they replace; the cached dtype wins, the shape must agree. Buffers and plain tensor attributes
    become private copies, since engines write to them. What the manifest or the module ties stays
    tied. The manifest's extras are set last.

    Raises :class:`WcacheError` that names what is cached and not in the module, what has another
    shape, what a manifest must not set, and what would stay on the meta device, unless
    ``allow_missing`` allows it. The module is changed only if none of that is so.
    """
    plan = _plan(module, manifest, tensors)
    extras = find_extras(plan.tree, manifest.extras, plan.described.keys())
    ties = _find_ties(plan, allow_missing)
    with torch.no_grad(), collector_paused():
        private = private_copies(manifest, tensors, plan.copies.keys())
        made: dict[int, torch.nn.Parameter] = {}
        for name, slot in plan.parameters.items():
            mapped = tensors[name]
            if id(mapped) not in made:
                made[id(mapped)] = _parameter(name, slot.owner._parameters[slot.leaf], mapped)
            slot.owner.register_parameter(slot.leaf, made[id(mapped)])
        for name, slot in plan.copies.items():
            _set_copy(slot, plan.described[name], private[name])
    for slot, source in ties:
        _set_same(slot, source.value)
    for extra in extras:
        extra.set()


@dataclass(kw_only=True, slots=True)
class _Plan:
    """Where each cached tensor goes."""

    tree: Tree
    described: dict[str, Tensor]
    parameters: dict[str, Slot] = field(default_factory=dict)
    copies: dict[str, Slot] = field(default_factory=dict)

    def slots(self) -> Iterator[Slot]:
        yield from self.parameters.values()
        yield from self.copies.values()


def _plan(
    module: torch.nn.Module, manifest: Manifest, tensors: Mapping[str, torch.Tensor]
) -> _Plan:
    plan = _Plan(tree=Tree(module), described={t.name: t for t in manifest.tensors})
    absent: list[str] = []
    problems: list[str] = []
    for tensor in manifest.tensors:
        slot = plan.tree.slot(tensor.name)
        if slot is None or (slot.kind is None and tensor.kind != "attribute"):
            absent.append(tensor.name)
        elif problem := _problem(slot, tensor, tuple(tensors[tensor.name].shape)):
            problems.append(f"{tensor.name} {problem}")
        elif tensor.kind == "parameter" and slot.kind == "parameter":
            plan.parameters[tensor.name] = slot
        else:
            plan.copies[tensor.name] = slot
    if absent:
        raise WcacheError(
            f"{_count(absent)} cached and not in {type(module).__name__}: {_first(absent)}",
            hint="build the module from the configuration that the weights were loaded with",
        )
    if problems:
        raise WcacheError(f"{type(module).__name__} can not be bound: {_first(problems)}")
    return plan


def _problem(slot: Slot, tensor: Tensor, shape: tuple[int, ...]) -> str:
    """Why ``tensor`` can not be put into ``slot``; empty when it can."""
    # A checkpoint does not say which of its tensors are buffers, so the module decides.
    is_same_kind = tensor.kind == slot.kind or (tensor.kind, slot.kind) == ("parameter", "buffer")
    if slot.kind is not None and not is_same_kind:
        return f"is cached as {tensor.kind} and is a {slot.kind} of the module"
    if slot.kind is None and not is_settable(slot.owner, slot.leaf, allow_tensor=True):
        return "is no attribute that a manifest may set"
    old = slot.value
    if slot.kind == "parameter" and old is not None:
        if torch.nn.parameter.is_lazy(old):
            return "is a lazy parameter, which has no shape yet"
        if hasattr(type(old), "__tensor_flatten__"):
            return f"is a {type(old).__name__}, which wraps other tensors"
    if slot.kind is not None and isinstance(old, torch.Tensor) and tuple(old.shape) != shape:
        return f"is cached as {list(shape)} and is {list(old.shape)} in the module"
    return ""


def _find_ties(plan: _Plan, allow_missing: AllowMissing) -> list[tuple[Slot, Slot]]:
    """Unbound (slot, bound slot with the same object) pairs.

    Raises :class:`WcacheError` when something would be left on the meta device.
    """
    bound = {(id(slot.owner), slot.leaf) for slot in plan.slots()}
    sources = {id(slot.value): slot for slot in plan.slots() if slot.value is not None}
    may_miss = allow_missing if callable(allow_missing) else allow_missing.__contains__
    ties, left = [], []
    for name, slot in plan.tree.tensors():
        if (id(slot.owner), slot.leaf) in bound:
            continue
        if (source := sources.get(id(slot.value))) is not None:
            ties.append((slot, source))
        elif slot.value is not None and slot.value.is_meta and not may_miss(name):
            left.append(name)
    if left:
        raise WcacheError(
            f"{_count(left)} in the module and not cached: {_first(left)}",
            hint="build the module from the configuration that the weights were loaded with; name"
            " what the module computes itself in allow_missing, and compute it after bind"
            " (from_cache does so for transformers)",
        )
    return ties


def _parameter(
    name: str, old: torch.nn.Parameter | None, mapped: torch.Tensor
) -> torch.nn.Parameter:
    """A parameter over ``mapped`` with the class and the attributes of ``old``."""
    assert old is not None  # a slot of kind parameter
    if type(old) is torch.nn.Parameter:
        new = torch.nn.Parameter(mapped, requires_grad=False)
    else:
        # Not its constructor: engines' parameter classes take arguments that only they know.
        try:
            new = torch.Tensor._make_subclass(type(old), mapped, False)
        except (RuntimeError, TypeError) as error:
            raise WcacheError(
                f"{name} can not be made a {type(old).__name__}: {str(error).splitlines()[0]}"
            ) from None
    new.__dict__.update(old.__dict__)
    return new


def _set_copy(slot: Slot, tensor: Tensor, copy: torch.Tensor) -> None:
    old, owner, leaf = slot.value, slot.owner, slot.leaf
    if slot.kind != "buffer":
        setattr(owner, leaf, copy)
        return
    persistent = tensor.persistent
    if tensor.kind == "parameter":
        persistent = leaf not in owner._non_persistent_buffers_set
    if old is not None:
        copy.__dict__.update(old.__dict__)
    owner.register_buffer(leaf, copy, persistent=persistent)


def _set_same(slot: Slot, value: torch.Tensor | None) -> None:
    """Puts the object that another slot was given into ``slot``."""
    if slot.kind == "parameter":
        assert value is None or isinstance(value, torch.nn.Parameter)
        slot.owner.register_parameter(slot.leaf, value)
    elif slot.kind == "buffer":
        persistent = slot.leaf not in slot.owner._non_persistent_buffers_set
        slot.owner.register_buffer(slot.leaf, value, persistent=persistent)
    else:
        setattr(slot.owner, slot.leaf, value)


def _count(names: list[str]) -> str:
    return "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"


def _first(names: list[str]) -> str:
    more = len(names) - _NAMES_TOLD
    return ", ".join(names[:_NAMES_TOLD]) + (f" and {more} more" if more > 0 else "")
