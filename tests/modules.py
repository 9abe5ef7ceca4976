"""Modules of any shape for property tests: odd dtypes and strides, views, ties, buffers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from hypothesis import strategies as st

from wcache.manifest import TensorKind
from wcache.memory.dtypes import TORCH_DTYPES

KINDS: tuple[TensorKind, ...] = ("parameter", "buffer", "attribute")


@dataclass
class Slot:
    """One tensor of a module, and how the module has it."""

    owner: str
    """Dotted name of the module; empty for the root."""
    leaf: str
    kind: TensorKind
    persistent: bool
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.leaf}" if self.owner else self.leaf


@dataclass
class Built:
    """A module, and its twin without content as an engine builds it."""

    slots: list[Slot] = field(default_factory=list)
    module: torch.nn.Module = field(default_factory=torch.nn.Module)
    twin: torch.nn.Module = field(default_factory=torch.nn.Module)


def raw(tensor: torch.Tensor) -> bytes:
    """The elements of ``tensor`` in their order, whatever its strides."""
    dense = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(dense.view(torch.uint8).tolist())


@st.composite
def modules(draw: st.DrawFn) -> Built:
    """At most 8 tensors in a tree of at most 4 modules."""
    owners = ["", *draw(st.lists(st.sampled_from(["a", "a.b", "c"]), max_size=3, unique=True))]
    owners += [owner.rpartition(".")[0] for owner in owners if "." in owner]
    built = Built()
    for number in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(KINDS))
        tensor = draw(_tensors([slot for slot in built.slots if slot.kind == kind]))
        if kind == "parameter" and not isinstance(tensor, torch.nn.Parameter):
            tensor = torch.nn.Parameter(tensor, requires_grad=False)
        persistent = kind == "parameter" or (kind == "buffer" and draw(st.booleans()))
        owner = draw(st.sampled_from(owners))
        built.slots.append(Slot(owner, f"t{number}", kind, persistent, tensor))
    _place(built.module, built.slots, meta=False)
    _place(built.twin, built.slots, meta=True)
    return built


@st.composite
def _tensors(draw: st.DrawFn, others: list[Slot]) -> torch.Tensor:
    """A new tensor, or one of ``others`` again, or a view of one."""
    if others and draw(st.integers(0, 3)) == 0:
        other = draw(st.sampled_from(others)).tensor
        if draw(st.booleans()):
            return other
        whole = torch.empty(0, dtype=other.dtype).set_(other.detach().untyped_storage())
        first = draw(st.integers(0, whole.numel()))
        return whole[first : draw(st.integers(first, whole.numel()))]
    dtype = TORCH_DTYPES[draw(st.sampled_from(sorted(TORCH_DTYPES)))]
    shape = draw(st.lists(st.integers(0, 4), max_size=5))
    layout = draw(st.sampled_from(["dense", "permuted", "gapped", "expanded", "offset"]))
    seed = draw(st.integers(0, 1 << 16))
    if layout == "permuted":
        order = draw(st.permutations(range(len(shape))))
        return _random(dtype, shape, seed).permute(*order) if shape else _random(dtype, [], seed)
    if layout == "gapped" and shape:
        return _random(dtype, [*shape[:-1], 2 * shape[-1]], seed)[..., ::2]
    if layout == "expanded" and shape:
        return _random(dtype, [*shape[:-1], 1], seed).expand(*shape[:-1], max(shape[-1], 1))
    if layout == "offset":
        skipped = draw(st.integers(1, 3))
        return _random(dtype, [prod(shape) + skipped], seed)[skipped:].view(shape)
    return _random(dtype, shape, seed)


def _random(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    """Any bytes, so also what is no number; but a bool is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype == torch.bool else 256
    nbytes = prod(shape) * dtype.itemsize
    data = torch.randint(0, top, (nbytes,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


def _place(root: torch.nn.Module, slots: list[Slot], *, meta: bool) -> None:
    empty: dict[int, torch.Tensor] = {}
    for slot in slots:
        owner = _owner(root, slot.owner)
        tensor = slot.tensor
        if meta:
            if slot.kind == "attribute":
                continue  # what post-processing leaves behind is not there yet
            tensor = empty.setdefault(id(slot.tensor), _without_content(slot.tensor))
        if isinstance(tensor, torch.nn.Parameter):
            owner.register_parameter(slot.leaf, tensor)
        elif slot.kind == "buffer":
            owner.register_buffer(slot.leaf, tensor, persistent=slot.persistent)
        else:
            setattr(owner, slot.leaf, tensor)


def _without_content(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=False)
    return made


def _owner(root: torch.nn.Module, path: str) -> torch.nn.Module:
    for name in filter(None, path.split(".")):
        if name not in root._modules:
            root.add_module(name, torch.nn.Module())
        child = root._modules[name]
        assert child is not None
        root = child
    return root


def found_in(module: torch.nn.Module) -> Iterator[Slot]:
    """Every tensor that ``module`` has now."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for leaf, parameter in owner._parameters.items():
            if parameter is not None:
                yield Slot(path, leaf, "parameter", True, parameter)
        for leaf, buffer in owner._buffers.items():
            if buffer is not None:
                persistent = leaf not in owner._non_persistent_buffers_set
                yield Slot(path, leaf, "buffer", persistent, buffer)
        for leaf, value in vars(owner).items():
            if isinstance(value, torch.Tensor):
                yield Slot(path, leaf, "attribute", False, value)
