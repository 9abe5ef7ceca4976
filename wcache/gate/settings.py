"""Which quantization methods the settings of a model name: config.json and files beside it. Pure.

The settings come in several dialects, and a table for the whole model may name another method for a
group of modules in it, so all of them are gone through.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wcache.fp8 import BLOCK
from wcache.gate.methods import key_of

# Of transformers and of older compressed-tensors; MLX calls its table "quantization", as other
# models do a table about something else.
_TABLES = ("quantization_config", "compression_config")
_MLX_TABLE = "quantization"
_NAME_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Found:
    """A method, and where it was met."""

    key: str
    """A key of :data:`wcache.gate.methods.BY_KEY`."""
    where: str
    """What is quantized with it, to begin a sentence with."""
    name: str = ""
    """What it calls itself, where that is not known."""
    settings: Mapping[str, Any] | None = None


def declared(raw: Mapping[str, Any], source: str) -> Iterator[Found]:
    """What a whole config.json declares, also for a part of a model (``text_config``)."""
    left: list[tuple[str, Mapping[str, Any]]] = [("", raw)]
    while left:
        path, table = left.pop()
        for key, value in table.items():
            if not isinstance(value, Mapping) or not value:
                continue
            inner = f"{path}{key}"
            if key in _TABLES or (key == _MLX_TABLE and "group_size" in value):
                yield from methods_of(value, f"{source}: {inner}")
            else:
                left.append((f"{inner}.", value))


def methods_of(settings: Mapping[str, Any], where: str) -> Iterator[Found]:
    """The methods of one table of settings, whoever wrote it."""
    name = settings.get("quant_method")
    name = str(getattr(name, "value", name))[:_NAME_CHARACTERS] if name is not None else ""
    key = key_of(name) if name else ""
    if key in ("fp8", "fp8-tensor", "fp8-channel"):
        yield from _fp8(settings, key, where)
    elif isinstance(settings.get("config_groups"), Mapping):
        yield from _compressed(settings["config_groups"], where)
    elif "quant_algo" in settings or isinstance(settings.get("quantization"), Mapping):
        yield from _modelopt(settings, where)
    elif key:
        yield Found(key, where, name)
    elif settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        yield Found("bitsandbytes", where)
    elif "bits" in settings and "group_size" in settings:
        # AutoGPTQ's files tell more than MLX's table in config.json.
        is_gptq = "desc_act" in settings or "sym" in settings
        yield Found("gptq" if is_gptq else "mlx", where)
    elif "w_bit" in settings:
        yield Found("awq", where)
    else:
        yield Found("unknown", where)


def _fp8(settings: Mapping[str, Any], key: str, where: str) -> Iterator[Found]:
    block = settings.get("weight_block_size", [BLOCK, BLOCK])  # where it is absent, headers tell
    if key != "fp8":
        pass
    elif block is None:
        key = "fp8-tensor"
    elif not isinstance(block, list | tuple) or list(block) != [BLOCK, BLOCK]:
        key = "fp8-channel"
    elif settings.get("activation_scheme", "dynamic") != "dynamic":
        key = "fp8-static"
    elif settings.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        key = "fp8-e5m2" if settings["fmt"] == "e5m2" else "unknown"
    elif settings.get("modules_to_convert"):
        key = "fp8-tensor"  # what transformers does to embeddings that are named there
    yield Found(key, where, settings=settings)
    expert = settings.get("expert_dtype", "fp8")
    if expert != "fp8":
        yield Found("mxfp4" if expert == "fp4" else "unknown", f"{where}.expert_dtype", str(expert))
    for name, table in settings.items():
        if isinstance(table, Mapping) and table:
            yield from methods_of(table, f"{where}.{name}")


def _compressed(groups: Mapping[str, Any], where: str) -> Iterator[Found]:
    """Each group has its own scheme, and none of them is kept; the names are for people."""
    if not groups:
        yield Found("compressed-tensors", where)
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        place = f"{where}.config_groups.{name}"
        key = _scheme(weights) if isinstance(weights, Mapping) else "compressed-tensors"
        yield Found(key, place)


def _scheme(weights: Mapping[str, Any]) -> str:
    kind, bits, strategy = (weights.get(name) for name in ("type", "num_bits", "strategy"))
    if kind == "float" and bits == 4:
        return "mxfp4" if weights.get("group_size") == 32 else "nvfp4"
    if kind == "float" and bits == 8 and strategy == "tensor":
        return "fp8-tensor"
    if kind == "float" and bits == 8 and strategy == "channel":
        return "fp8-channel"
    return "compressed-tensors"


def _modelopt(settings: Mapping[str, Any], where: str) -> Iterator[Found]:
    inner = settings.get("quantization")
    table = inner if isinstance(inner, Mapping) else settings
    layers = table.get("quantized_layers")
    if isinstance(layers, Mapping) and layers:
        for name, layer in layers.items():
            algorithm = layer.get("quant_algo") if isinstance(layer, Mapping) else None
            yield Found(_algorithm(algorithm), f"{where}.quantized_layers.{name}")
    elif table.get("quant_algo") is not None or "quant_method" in settings:
        yield Found(_algorithm(table.get("quant_algo")), where)


def _algorithm(name: object) -> str:
    """ModelOpt's ``FP8``, ``NVFP4``, ``W4A16_AWQ`` and so on."""
    text = str(name).upper()
    for part, key in (
        ("NVFP4", "nvfp4"),
        ("MXFP4", "mxfp4"),
        ("MXFP8", "fp8-ue8m0"),
        ("AWQ", "awq"),
    ):
        if part in text:
            return key
    return "fp8-tensor" if text == "FP8" else "modelopt"
