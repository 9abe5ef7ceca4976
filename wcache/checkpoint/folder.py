"""A checkpoint folder: its config, its safetensors files and the tensors that it declares."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from wcache.checkpoint.document import (
    HINT_DOWNLOAD,
    parse_object,
    quote,
    read_document,
    unreadable,
)
from wcache.checkpoint.header import CheckpointFile, TensorEntry, read_header
from wcache.errors import CheckpointError, UnsupportedQuantForIPCError
from wcache.gate.methods import BY_KEY

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Where ModelOpt, AutoGPTQ and AutoAWQ say what config.json may not."""


class _Declared(msgspec.Struct, frozen=True):
    """The fields of config.json that decide how weights are placed; the rest is passed over."""

    architectures: tuple[str, ...] | None = None
    tie_word_embeddings: bool | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """config.json."""

    architectures: tuple[str, ...]
    tie_word_embeddings: bool | None
    """None where the file does not say."""
    dtype: str | None
    """As torch names it, without ``torch.``."""
    quantization_config: Mapping[str, Any] | None
    raw: Mapping[str, Any] = field(repr=False)
    """The whole of it, for whoever builds the model."""
    data: bytes = field(repr=False)
    """The file's bytes."""

    @property
    def architecture(self) -> str | None:
        return self.architectures[0] if self.architectures else None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose headers have been read and checked; none of its weights have."""

    path: Path
    config: CheckpointConfig
    files: tuple[CheckpointFile, ...]
    """Sorted by name."""
    tensors: dict[str, TensorEntry] = field(repr=False)
    """Sorted by file and place in it, which is the order to read them in."""
    quantization_files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    """Those of :data:`QUANTIZATION_FILES` that are there, by name."""
    opened_ns: int = 0
    """Unix time before any of it was read; 0 where that is not known."""

    @cached_property
    def total_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads config, index and headers of a checkpoint folder.

    Raises :class:`CheckpointError` when it is absent, is no checkpoint, or any file that it needs
    is missing, truncated or contradicts itself.
    """
    opened_ns = time.time_ns()
    try:
        names = {entry.name for entry in path.iterdir()}
    except PermissionError as error:
        raise unreadable(path, error) from None
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint: {path}: {(error.strerror or str(error)).lower()}",
            hint="it must be a folder with config.json and safetensors files",
        ) from None
    if CONFIG not in names:
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no {CONFIG}",
            hint="it must be a folder with config.json and safetensors files",
        )
    config = _read_config(path / CONFIG)
    # transformers, too, prefers the single file where both are there.
    if SINGLE in names:
        file, tensors = read_header(path / SINGLE)
        files = [file]
    elif INDEX in names:
        files, tensors = _read_shards(path)
    else:
        raise _no_safetensors(path, names)
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors", hint=HINT_DOWNLOAD)
    return Checkpoint(
        path=path,
        config=config,
        files=tuple(files),
        tensors=tensors,
        quantization_files={
            name: parse_object(read_document(path / name), str(path / name))
            for name in QUANTIZATION_FILES
            if name in names
        },
        opened_ns=opened_ns,
    )


def _read_config(path: Path) -> CheckpointConfig:
    data = read_document(path)
    raw = parse_object(data, str(path))
    try:
        declared = msgspec.convert(raw, _Declared)
    except msgspec.ValidationError as error:
        reason = str(error)
        raise CheckpointError(f"{path}: {reason[0].lower()}{reason[1:160]}") from None
    dtype = declared.dtype or declared.torch_dtype
    return CheckpointConfig(
        architectures=declared.architectures or (),
        tie_word_embeddings=declared.tie_word_embeddings,
        dtype=dtype.removeprefix("torch.") if dtype else None,
        quantization_config=declared.quantization_config,
        raw=raw,
        data=data,
    )


def _read_shards(path: Path) -> tuple[list[CheckpointFile], dict[str, TensorEntry]]:
    """What the index lists, and nothing else.

    A shard may hold more than the index gives it, stale copies after a merge for one; only the
    tensors that the index assigns to a file are taken from it (vllm #54230).
    """
    wanted: dict[str, set[str]] = {}
    for tensor, name in _read_weight_map(path / INDEX).items():
        wanted.setdefault(name, set()).add(tensor)
    files: list[CheckpointFile] = []
    tensors: dict[str, TensorEntry] = {}
    for name in sorted(wanted):
        shard = path / name
        try:
            shard.stat()
        except FileNotFoundError:
            raise CheckpointError(
                f"{path}: shard {name} is missing", hint="download the checkpoint again"
            ) from None
        except OSError as error:
            raise unreadable(shard, error) from None
        file, found = read_header(shard)
        if absent := wanted[name] - found.keys():
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            raise CheckpointError(
                f"{path / INDEX}: tensor {quote(min(absent))}{more} is not in {name}",
                hint="index and shards are of different checkpoints: download both again",
            )
        files.append(file)
        tensors.update((tensor, found[tensor]) for tensor in found if tensor in wanted[name])
    return files, tensors


def _read_weight_map(path: Path) -> dict[str, str]:
    table = parse_object(read_document(path), str(path))
    try:
        weight_map = msgspec.convert(table.get("weight_map"), dict[str, str])
    except msgspec.ValidationError:
        raise CheckpointError(
            f"{path} has no weight_map of names and files", hint=HINT_DOWNLOAD
        ) from None
    for tensor, name in weight_map.items():
        # The index may not point out of the folder: it came from wherever the model came from.
        if "/" in name or "\0" in name or not name.endswith(SUFFIX) or name == SUFFIX:
            raise CheckpointError(
                f"{path}: tensor {quote(tensor)} is said to be in {quote(name)},"
                " which is no safetensors file of the folder"
            )
    return weight_map


def _no_safetensors(path: Path, names: set[str]) -> CheckpointError:
    """Says what the folder holds instead, since each case is mended in another way."""
    if "adapter_config.json" in names:
        return CheckpointError(
            f"{path} is an adapter, not a whole model", hint="merge it into its base model first"
        )
    for suffixes, hint in (
        ((".bin", ".pt", ".pth"), "convert it to safetensors: load it with transformers and"
                                  " save_pretrained() it to another folder"),
        ((SUFFIX,), f"wcache reads {SINGLE}, or the shards that {INDEX} names"),
    ):  # fmt: skip
        if found := sorted(name for name in names if name.endswith(suffixes)):
            return CheckpointError(
                f"{path} has neither {SINGLE} nor {INDEX}, only {quote(found[0])}", hint=hint
            )
    if found := sorted(name for name in names if name.endswith(".gguf")):
        method = BY_KEY["gguf"]
        return UnsupportedQuantForIPCError(
            f"{path} has neither {SINGLE} nor {INDEX}, only {quote(found[0])}:"
            f" weights quantized with {method.title} can not be kept: {method.reason}",
            method=method.key,
            hint=method.way_out,
        )
    return CheckpointError(
        f"{path} has neither {SINGLE} nor {INDEX}", hint="download the checkpoint again"
    )
