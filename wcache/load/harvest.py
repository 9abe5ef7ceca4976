"""Every tensor of a torch module, and the storages behind them, as a manifest describes them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from wcache import gate
from wcache.errors import WcacheError
from wcache.load.plan import align
from wcache.manifest import STORAGE_ALIGNMENT, Tensor, TensorKind
from wcache.memory.dtypes import DTYPE_NAMES

_SHOWN_NAMES = 5


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor and the name under which the module has it."""

    name: str
    tensor: torch.Tensor
    kind: TensorKind
    persistent: bool


@dataclass(frozen=True, slots=True)
class Source:
    """A storage of the module's, and its place in the slabs laid back to back."""

    storage: torch.UntypedStorage
    offset: int
    nbytes: int

    def content(self) -> torch.Tensor:
        """uint8[nbytes] over the storage itself, without a copy."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


@dataclass(frozen=True, slots=True)
class Harvest:
    """What a module holds, ready to be copied."""

    tensors: tuple[Tensor, ...]
    sources: tuple[Source, ...]
    """By index as :attr:`Tensor.storage` counts them."""
    total_bytes: int
    """What the slabs must have room for."""

    @property
    def weight_bytes(self) -> int:
        return sum(source.nbytes for source in self.sources)


def harvest(module: torch.nn.Module, *, device_type: str | None = None) -> Harvest:
    """All parameters, buffers and plain tensor attributes of ``module`` and its submodules.

    ``device_type`` leaves out what lies on any other device: copies that an engine keeps on the
    host beside a model on a GPU, which it makes by itself.

    Storages are taken whole and once, also where views use a part of them only: so views, ties,
    strides and offsets stay what they are, and whoever wants less memory clones the view before.
    Raises :class:`WcacheError`, with names, for tensors that are not plain bytes: on the meta
    device, sparse, quantized by torch, wrapped by a subclass, or of a dtype that wcache can not
    carry.
    """
    found = list(_tensors(module))
    _check_no_meta(found)
    if device_type is not None:
        found = [item for item in found if item.tensor.device.type == device_type]
    first_names: dict[int, str] = {}
    places: dict[tuple[str, int, int], int] = {}
    sources: list[Source] = []
    tensors: list[Tensor] = []
    end = 0
    for item in found:
        _check_plain(item)
        storage = item.tensor.untyped_storage()
        key = (str(storage.device), storage.data_ptr(), storage.nbytes())
        if key not in places:
            places[key] = len(sources)
            sources.append(Source(storage, align(end), storage.nbytes()))
            end = align(end) + storage.nbytes()
        tied_to = first_names.get(id(item.tensor))
        first_names.setdefault(id(item.tensor), item.name)
        tensors.append(
            Tensor(
                name=item.name,
                storage=places[key],
                dtype=DTYPE_NAMES[item.tensor.dtype],
                shape=tuple(item.tensor.shape),
                stride=item.tensor.stride(),
                storage_offset=int(item.tensor.storage_offset()),
                kind=item.kind,
                persistent=item.persistent,
                tied_to=tied_to,
            )
        )
    if not tensors:
        raise WcacheError(f"{type(module).__name__} has no tensors to publish")
    return Harvest(tuple(tensors), tuple(sources), max(align(end), STORAGE_ALIGNMENT))


def quantization_of(module: torch.nn.Module) -> str | None:
    """The method that ``module`` or a part of it says its weights are quantized with.

    transformers leaves its settings on models and their configurations, vLLM and SGLang on the
    ``quant_method`` of layers. None where nothing is said, which proves nothing. Raises
    :class:`wcache.errors.UnsupportedQuantForIPCError` for a method that can not be kept.
    """
    methods: set[str] = set()
    seen: set[int] = set()
    for name, part in module.named_modules():
        where = name or type(module).__name__
        for settings in _quantization_settings(part):
            if id(settings) not in seen:
                seen.add(id(settings))
                methods.add(gate.check_settings(as_table(settings), where))
    return min(methods) if methods else None  # fp8 before none


def _quantization_settings(part: torch.nn.Module) -> Iterator[object]:
    holders = (
        (part, "quantization_config"),
        (getattr(part, "config", None), "quantization_config"),
        (getattr(part, "hf_quantizer", None), "quantization_config"),
        (part, "quant_config"),
        (getattr(part, "quant_method", None), "quant_config"),
    )
    for holder, name in holders:
        settings = getattr(holder, name, None)
        if settings is not None:
            yield settings


def as_table(settings: object) -> Mapping[str, Any]:
    """What an engine's object says of a quantization, as config.json would."""
    if isinstance(settings, Mapping):
        return settings
    if callable(to_dict := getattr(settings, "to_dict", None)):
        return dict(to_dict())
    name = type(settings).__name__
    if callable(get_name := getattr(settings, "get_name", None)):
        name = str(get_name())
    table = {"quant_method": name}
    for key in ("weight_block_size", "activation_scheme"):
        if hasattr(settings, key):
            table[key] = getattr(settings, key)
    return table


def _tensors(module: torch.nn.Module) -> Iterator[Found]:
    """By name, a module that is reachable under two names under both: those are ties too."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield Found(dot + name, parameter, "parameter", True)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                persistent = name not in part._non_persistent_buffers_set
                yield Found(dot + name, buffer, "buffer", persistent)
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                yield Found(dot + name, value, "attribute", False)


def _check_no_meta(found: list[Found]) -> None:
    names = [item.name for item in found if item.tensor.is_meta]
    if names:
        shown = ", ".join(names[:_SHOWN_NAMES])
        more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        raise WcacheError(
            f"tensors without content (on the meta device): {shown}{more}",
            hint="publish a module that is loaded completely",
        )


def _check_plain(item: Found) -> None:
    if reason := _why_not_plain(item.tensor):
        raise WcacheError(
            f"{item.kind} {item.name!r} can not be published: {reason}",
            hint="only tensors that are bytes, shape and strides can be mapped by another process",
        )


def _why_not_plain(tensor: torch.Tensor) -> str:
    if torch.nn.parameter.is_lazy(tensor):
        return "it is not initialized"
    if tensor.layout != torch.strided:
        return f"its layout is {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_quantized:
        return f"it is quantized by torch ({str(tensor.dtype).removeprefix('torch.')})"
    if _is_wrapper(tensor):
        return f"it is a {type(tensor).__name__}, which keeps its content in other tensors"
    if tensor.dtype not in DTYPE_NAMES:
        return f"its dtype is {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.is_conj() or tensor.is_neg():
        return "it is a conjugate or negative view that torch has not computed yet"
    extent = 1 + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    reach = (tensor.storage_offset() + extent) * tensor.element_size()
    if tensor.numel() and reach > tensor.untyped_storage().nbytes():
        return "its storage was freed"
    return ""


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """True for subclasses (DTensor, torchao's) that intercept every operation on their content."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
