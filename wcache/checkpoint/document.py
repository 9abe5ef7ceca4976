"""JSON documents of a checkpoint: bounded before they are read, strict when they are parsed."""

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from wcache.errors import CheckpointError, ExitCode
from wcache.machine.permissions import who_may

MAX_DOCUMENT_BYTES = 100_000_000
"""The bound that safetensors sets for its header (its MAX_HEADER_SIZE)."""

HINT_DOWNLOAD = "the file is damaged or incomplete: download it again"


def open_file(path: Path) -> tuple[int, os.stat_result]:
    """A descriptor of a regular file, close-on-exec, and its status.

    O_NONBLOCK because open(2) of a fifo would otherwise wait for a writer that never comes.
    Raises :class:`CheckpointError`.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise unreadable(path, error) from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise CheckpointError(f"{path} is not a regular file")
    return fd, status


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """With who may read it, and the exit code of that, where it is a matter of permission."""
    what = f"{path} can not be read: {(error.strerror or str(error)).lower()}"
    if isinstance(error, PermissionError):
        return CheckpointError(what, hint=who_may(path, os.R_OK), exit_code=ExitCode.NO_PERMISSION)
    return CheckpointError(what)


def read_exactly(fd: int, nbytes: int, offset: int, path: Path) -> bytes:
    """``nbytes`` from ``offset``; raises :class:`CheckpointError` when the file ends before."""
    parts = []
    while nbytes:
        try:
            part = os.pread(fd, nbytes, offset)
        except OSError as error:
            raise unreadable(path, error) from None
        if not part:
            raise CheckpointError(f"{path} shrank while it was read", hint=HINT_DOWNLOAD)
        parts.append(part)
        nbytes -= len(part)
        offset += len(part)
    return b"".join(parts)


def read_document(path: Path, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """The whole of a small file; raises :class:`CheckpointError` when it is not small."""
    fd, status = open_file(path)
    try:
        if status.st_size > most_bytes:
            raise CheckpointError(
                f"{path} has {status.st_size} bytes, at most {most_bytes} are taken"
            )
        return read_exactly(fd, status.st_size, 0, path)
    finally:
        os.close(fd)


def parse_object(data: bytes, source: str) -> dict[str, Any]:
    """Parses a JSON object; ``source`` begins the error's line.

    Stricter than either parser alone: a key that is there twice, which msgspec and a plain
    json.loads settle silently for the last one, is an error, and so are NaN and Infinity.
    """
    try:
        value = _DECODER.decode(data.decode())
    except UnicodeDecodeError:
        raise CheckpointError(f"{source} is not UTF-8", hint=HINT_DOWNLOAD) from None
    except _DuplicateKeyError as error:
        raise CheckpointError(
            f"{source} has the key {quote(str(error))} twice", hint=HINT_DOWNLOAD
        ) from None
    except RecursionError:
        raise CheckpointError(f"{source} is nested too deeply", hint=HINT_DOWNLOAD) from None
    except ValueError as error:
        # The only other ValueError is int()'s, which bounds the digits that it will convert.
        is_grammar = isinstance(error, json.JSONDecodeError)
        reason = str(error)[:120] if is_grammar else "a number is too long"
        raise CheckpointError(f"{source} is not JSON: {reason}", hint=HINT_DOWNLOAD) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{source} is not a JSON object", hint=HINT_DOWNLOAD)
    return value


def quote(name: str) -> str:
    """A name from a file as it may stand in a line for the operator: escaped and cut."""
    return repr(name if len(name) <= 160 else name[:157] + "...")


class _DuplicateKeyError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return table


def _no_constant(name: str) -> NoReturn:
    raise json.JSONDecodeError(f"{name} is no number", name, 0)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
