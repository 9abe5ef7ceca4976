"""The header of a safetensors file: read within bounds and checked against the file's size.

The format: an 8-byte little-endian length, that many bytes of JSON, then the tensors' bytes
(https://github.com/huggingface/safetensors#format). What its own library refuses is refused here,
with the name of the tensor, and key duplicates and oversized shapes besides.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from wcache.checkpoint.document import (
    HINT_DOWNLOAD,
    MAX_DOCUMENT_BYTES,
    open_file,
    parse_object,
    quote,
    read_exactly,
)
from wcache.errors import CheckpointError
from wcache.manifest import DTYPE_BYTES, MAX_DIMENSIONS, MAX_NAME_LENGTH

LENGTH_BYTES = 8
METADATA = "__metadata__"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where a tensor's bytes lie, row-major and without gaps."""

    file: str
    """Name of the file in the checkpoint's folder."""
    dtype: str
    """A key of :data:`wcache.manifest.DTYPE_BYTES`."""
    shape: tuple[int, ...]
    start: int
    """Byte offset in the file."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """A safetensors file as it was when its header was checked."""

    name: str
    nbytes: int
    header: str
    """``sha256:…`` of the header's JSON."""
    stamp: tuple[int, int, int, int]
    """Device, inode, size and modification time in ns: whether it is still the same file."""


class _Info(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def stamp(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_header(path: Path) -> tuple[CheckpointFile, dict[str, TensorEntry]]:
    """Reads and checks one file's header.

    Raises :class:`CheckpointError` unless its tensors have known dtypes, byte spans that agree with
    their shapes, and together cover the file exactly.
    """
    fd, status = open_file(path)
    try:
        data = _read_header_bytes(fd, status.st_size, path)
    finally:
        os.close(fd)
    entries = parse_header(data, file_bytes=status.st_size, path=path)
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    return (
        CheckpointFile(name=path.name, nbytes=status.st_size, header=digest, stamp=stamp(status)),
        entries,
    )


def _read_header_bytes(fd: int, file_bytes: int, path: Path) -> bytes:
    if file_bytes < LENGTH_BYTES:
        raise CheckpointError(
            f"{path} is truncated: it has {file_bytes} bytes, too few for a header",
            hint=HINT_DOWNLOAD,
        )
    length = int.from_bytes(read_exactly(fd, LENGTH_BYTES, 0, path), "little")
    if length > file_bytes - LENGTH_BYTES:
        raise CheckpointError(
            f"{path} says its header has {length} bytes, the file has {file_bytes}",
            hint="it is truncated or no safetensors file: download it again",
        )
    if length > MAX_DOCUMENT_BYTES:
        raise CheckpointError(
            f"{path} says its header has {length} bytes, at most {MAX_DOCUMENT_BYTES} are taken"
        )
    return read_exactly(fd, length, LENGTH_BYTES, path)


def parse_header(data: bytes, *, file_bytes: int, path: Path) -> dict[str, TensorEntry]:
    """The tensors of a header of ``len(data)`` bytes in a file of ``file_bytes``. Pure.

    In the order in which their bytes lie in the file.
    """
    if not data.startswith(b"{"):
        raise CheckpointError(f"{path} has a header that is not JSON", hint=HINT_DOWNLOAD)
    table = parse_object(data, f"{path}: header")
    _check_metadata(table.pop(METADATA, None), path)
    base = LENGTH_BYTES + len(data)
    infos = {name: _convert(name, value, path) for name, value in table.items()}
    order = sorted(infos, key=lambda name: infos[name].data_offsets)
    entries: dict[str, TensorEntry] = {}
    end = 0
    for name in order:
        info = infos[name]
        start, stop = info.data_offsets
        _check_span(name, info, path)
        if stop > file_bytes - base:
            raise CheckpointError(
                f"{path}: tensor {quote(name)} ends at byte {base + stop},"
                f" the file has {file_bytes}",
                hint="the file is truncated: download it again",
            )
        if start < end:
            raise CheckpointError(
                f"{path}: tensor {quote(name)} overlaps the one before it", hint=HINT_DOWNLOAD
            )
        if start > end:
            raise CheckpointError(
                f"{path}: {start - end} bytes before tensor {quote(name)} belong to no tensor",
                hint=HINT_DOWNLOAD,
            )
        end = stop
        entries[name] = TensorEntry(
            file=path.name, dtype=info.dtype, shape=info.shape, start=base + start,
            nbytes=stop - start,
        )  # fmt: skip
    if base + end != file_bytes:
        raise CheckpointError(
            f"{path}: {file_bytes - base - end} bytes at its end belong to no tensor",
            hint=HINT_DOWNLOAD,
        )
    return entries


def _check_metadata(value: Any, path: Path) -> None:
    if value is None:
        return
    try:
        msgspec.convert(value, dict[str, str])
    except msgspec.ValidationError:
        raise CheckpointError(
            f"{path}: {METADATA} is not a table of strings", hint=HINT_DOWNLOAD
        ) from None


def _convert(name: str, value: Any, path: Path) -> _Info:
    try:
        info = msgspec.convert(value, _Info)
    except msgspec.ValidationError as error:
        reason = str(error)
        raise CheckpointError(
            f"{path}: tensor {quote(name)}: {reason[0].lower()}{reason[1:160]}",
            hint=HINT_DOWNLOAD,
        ) from None
    if not 0 < len(name) <= MAX_NAME_LENGTH or not _is_utf8(name):
        raise CheckpointError(f"{path}: {quote(name)} can not be the name of a tensor")
    if len(info.shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"{path}: tensor {quote(name)} has {len(info.shape)} dimensions")
    return info


def _is_utf8(name: str) -> bool:
    """False with a lone surrogate, which can stand in JSON, but in no UTF-8 of a manifest."""
    if name.isascii():
        return True
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_span(name: str, info: _Info, path: Path) -> None:
    item = DTYPE_BYTES.get(info.dtype)
    if item is None:
        raise CheckpointError(
            f"{path}: tensor {quote(name)} has the unknown dtype {quote(info.dtype)}",
            hint="wcache takes " + ", ".join(DTYPE_BYTES),
        )
    start, stop = info.data_offsets
    if min((start, stop, *info.shape)) < 0:
        raise CheckpointError(
            f"{path}: tensor {quote(name)} has a negative size or offset", hint=HINT_DOWNLOAD
        )
    # Python's integers do not wrap, so no product of sizes can slip under the span.
    wanted = item
    for size in info.shape:
        wanted *= size
    if stop - start != wanted:
        raise CheckpointError(
            f"{path}: tensor {quote(name)} has {stop - start} bytes,"
            f" {info.dtype}{list(info.shape)} needs {wanted}",
            hint=HINT_DOWNLOAD,
        )
