"""Which quantization methods the names, dtypes and shapes of a checkpoint's tensors show. Pure.

config.json may be silent about a part of a model, or wrong: what lies in the files decides. Tensors
are looked at by the module that they belong to, as one module has one method.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Protocol

from wcache.errors import CheckpointError
from wcache.fp8 import SCALE_DTYPES, WEIGHT_DTYPE, grid, scale_name, weight_name
from wcache.gate.settings import Found


class Entry(Protocol):
    """A tensor as a header declares it, :class:`wcache.checkpoint.TensorEntry` for one."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


Tensors = Mapping[str, Entry]

_INTEGERS = ("U8", "I8", "U16", "I16", "U32", "I32")
# The first of these that a leaf meets names the method of its module. Where dtypes are given, the
# name alone is too common to tell.
_MARKS: tuple[tuple[str, re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (key, re.compile(pattern), dtypes)
    for key, pattern, dtypes in (
        ("nvfp4", r"(.*_)?(scale_2|global_scale)", ()),
        ("mxfp4", r"(.*_)?(blocks|scales|scale)", ("U8",)),
        ("bitsandbytes", r"(nested_)?(absmax|quant_map)|SCB|weight_format|bitsandbytes__\w+", ()),
        ("gptq", r"(.*_)?g_idx", ()),
        ("marlin", r"B|B_24|B_meta|workspace|marlin_\w+", _INTEGERS),
        ("compressed-tensors", r"(.*_)?weight_(packed|shape|zero_point|bitmask)", ()),
        ("hqq", r"W_q", ()),
        ("codebook", r"codes|(res_|outlier_)?indices|row_offsets", _INTEGERS),
        ("codebook", r"Qidxs\w*|(forward|backward)_hadamard_matrix|dqweight", ()),
        ("quanto", r"_data|_scale|_shift", ()),
        ("torchao", r".*:.*|(.*_)?qdata", ()),
        ("awq", r"(.*_)?qzeros", ()),
        ("fp8-e5m2", r".*", ("F8_E5M2",)),
        ("fp8-ue8m0", r".*", ("F8_E8M0",)),
    )
)
# Integers of more than one dimension that are no weights: masks and positions, which old
# checkpoints have as buffers.
_BUFFERS = re.compile(
    r"(masked_)?bias|(position|token_type)_ids|(attn_|attention_|causal_)?mask"
    r"|relative_(position|coords)\w*|tid2eid"
)
_STATIC = re.compile(r"(.*_)?(input|activation)_scale")
_SCALES = re.compile(r"(.*_)?(weight_scale|scale_weight|qscale_weight|scale)s?")


def found_in(tensors: Tensors) -> Iterator[Found]:
    """Every module whose tensors are not plain ones, with its method."""
    modules: dict[str, dict[str, Entry]] = {}
    for name, entry in tensors.items():
        module, _, leaf = name.rpartition(".")
        modules.setdefault(module, {})[leaf] = entry
    for module, leaves in modules.items():
        if key := _method(leaves):
            yield Found(key, module or "the model")


def _method(leaves: Mapping[str, Entry]) -> str | None:
    has_fp8 = any(entry.dtype == WEIGHT_DTYPE for entry in leaves.values())
    marks = [_mark(leaf, entry.dtype) for leaf, entry in leaves.items()]
    first = min(marks)
    if first < len(_MARKS):
        key = _MARKS[first][0]
        # The exponents of MX formats are bytes in either.
        return "fp8-ue8m0" if key == "mxfp4" and has_fp8 else key
    if has_fp8:
        return _fp8(leaves)
    packed = [
        (leaf, entry.dtype)
        for leaf, entry in leaves.items()
        if entry.dtype in _INTEGERS and len(entry.shape) > 1 and not _BUFFERS.fullmatch(leaf)
    ]
    return _integers(*packed[0], leaves) if packed else None


@functools.lru_cache(maxsize=4096)  # models of 100,000 tensors have a few dozen of these
def _mark(leaf: str, dtype: str) -> int:
    """Index of the first of :data:`_MARKS` that a tensor meets; behind the last for none."""
    for index, (_, pattern, dtypes) in enumerate(_MARKS):
        if pattern.fullmatch(leaf) and (not dtypes or dtype in dtypes):
            return index
    return len(_MARKS)


def _fp8(leaves: Mapping[str, Entry]) -> str:
    if any(_STATIC.fullmatch(leaf) for leaf in leaves):
        return "fp8-static"
    for leaf, entry in leaves.items():
        if entry.dtype == WEIGHT_DTYPE and scale_name(leaf) not in leaves:
            others = [scale for name, scale in leaves.items() if _SCALES.fullmatch(name)]
            if others:
                return "fp8-tensor" if prod(others[0].shape) == 1 else "fp8-channel"
    return "fp8"


def _integers(leaf: str, dtype: str, leaves: Mapping[str, Entry]) -> str:
    if leaf == "weight":
        if dtype == "I8":
            return "eetq"
        if dtype == "U32" and "scales" in leaves:
            return "mlx"
        if dtype == "U8" and "weight_scale" in leaves:
            return "bitnet"
    return "packed"


def check_blocks(tensors: Tensors, source: Any) -> bool:
    """Whether there are block-wise FP8 weights in ``source``.

    Raises :class:`CheckpointError`, with the tensor and the numbers, for a weight without its scale
    and the other way round, and for a scale of another dtype or shape than its weight's blocks ask.
    """
    weights = [name for name, entry in tensors.items() if entry.dtype == WEIGHT_DTYPE]
    for name in weights:
        _check_pair(name, tensors, source)
    for name in tensors:
        weight = weight_name(name)
        if weight is None or (weight in tensors and tensors[weight].dtype == WEIGHT_DTYPE):
            continue
        what = f"is {tensors[weight].dtype}" if weight in tensors else "is not there"
        raise CheckpointError(
            f"{source}: {name!r} is the scale of an FP8 weight, but {weight!r} {what}"
        )
    return bool(weights)


def _check_pair(name: str, tensors: Tensors, source: Any) -> None:
    shape = tensors[name].shape
    scale = tensors.get(scale_name(name))
    if len(shape) < 2:
        raise CheckpointError(f"{source}: {name!r} is FP8 and has the shape {list(shape)}, which"
                              " has no blocks")  # fmt: skip
    if scale is None:
        raise CheckpointError(
            f"{source}: FP8 weight {name!r} has no scale {scale_name(name)!r}",
            hint="the checkpoint is incomplete: download it again",
        )
    if scale.dtype not in SCALE_DTYPES:
        raise CheckpointError(
            f"{source}: scale {scale_name(name)!r} is {scale.dtype},"
            f" not {' or '.join(SCALE_DTYPES)}"
        )
    if scale.shape != grid(shape):
        raise CheckpointError(
            f"{source}: scale {scale_name(name)!r} has the shape {list(scale.shape)}, blocks of"
            f" 128x128 of a weight {list(shape)} need {list(grid(shape))}"
        )
