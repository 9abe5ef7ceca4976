"""Damaged checkpoints: each is one line that names the file, and the tensor where there is one."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open

from tests.checkpoints import info, raw_file, write_checkpoint, write_index, write_llama
from wcache.checkpoint import open_checkpoint
from wcache.errors import CheckpointError, ExitCode, UnsupportedQuantForIPCError

pytestmark = pytest.mark.hostile

TWO = {"a": info("F32", [2], 0, 8), "b": info("F32", [2], 8, 16)}

# What the file holds, and the line after the file's path.
FILES: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", " is truncated: it has 0 bytes, too few for a header"),
    "half a length": (b"\1\0\0", " is truncated: it has 3 bytes, too few for a header"),
    "header longer than the file": (
        raw_file(TWO, b"", length=5000),
        " says its header has 5000 bytes, the file has {size}",
    ),
    "length of all ones": (
        raw_file(TWO, bytes(16), length=2**64 - 1),
        " says its header has 18446744073709551615 bytes, the file has {size}",
    ),
    "no header": (raw_file(b"", b""), " has a header that is not JSON"),
    "header of an array": (raw_file(b"[1]", b""), " has a header that is not JSON"),
    "header begins with a space": (raw_file(b" {}", b""), " has a header that is not JSON"),
    "half a header": (
        raw_file(b'{"a": {"dtype"', b""),
        ": header is not JSON: Expecting ':' delimiter: line 1 column 15 (char 14)",
    ),
    "header behind the header": (
        raw_file(b"{}{}", b""),
        ": header is not JSON: Extra data: line 1 column 3 (char 2)",
    ),
    "bytes that are no UTF-8": (raw_file(b'{"\xff": 1}', b""), ": header is not UTF-8"),
    "nested without end": (
        raw_file(b'{"a":' + b"[" * 100_000, b""),
        ": header is nested too deeply",
    ),
    "number without end": (
        raw_file(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}', b"x"),
        ": header is not JSON: a number is too long",
    ),
    "duplicate tensor": (
        raw_file(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                 b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        ": header has the key 'a' twice",
    ),
    "metadata of numbers": (
        raw_file({"__metadata__": {"a": 1}}, b""),
        ": __metadata__ is not a table of strings",
    ),
    "tensor without dtype": (
        raw_file({"a": {"shape": [1], "data_offsets": [0, 1]}}, b"x"),
        ": tensor 'a': object missing required field `dtype`",
    ),
    "shape of floats": (
        raw_file({"a": {"dtype": "U8", "shape": [1.5], "data_offsets": [0, 1]}}, b"x"),
        ": tensor 'a': expected `int`, got `float` - at `$.shape[0]`",
    ),
    "three offsets": (
        raw_file({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"x"),
        ": tensor 'a': expected `array` of length 2, got 3 - at `$.data_offsets`",
    ),
    "unknown dtype": (
        raw_file({"a": info("F12", [2], 0, 3)}, b"xyz"),
        ": tensor 'a' has the unknown dtype 'F12'",
    ),
    "size that is not a number": (
        raw_file(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"x"),
        ": header is not JSON: NaN is no number: line 1 column 1 (char 0)",
    ),
    "negative size": (
        raw_file({"a": info("U8", [-1, -1], 0, 1)}, b"x"),
        ": tensor 'a' has a negative size or offset",
    ),
    "negative offset": (
        raw_file({"a": info("U8", [1], -1, 0)}, b"x"),
        ": tensor 'a' has a negative size or offset",
    ),
    "end before its start": (
        raw_file({"a": info("U8", [2], 2, 0)}, b"xy"),
        ": tensor 'a' has -2 bytes, U8[2] needs 2",
    ),
    "span that is not the shape's": (
        raw_file({"a": info("F32", [3], 0, 8)}, bytes(8)),
        ": tensor 'a' has 8 bytes, F32[3] needs 12",
    ),
    "sizes whose product wraps in 64 bits": (
        raw_file({"a": info("U8", [2**32, 2**32, 1], 0, 0)}, b""),
        ": tensor 'a' has 0 bytes, U8[4294967296, 4294967296, 1] needs 18446744073709551616",
    ),
    "out of range": (
        raw_file({"a": info("F32", [1000], 0, 4000)}, bytes(8)),
        ": tensor 'a' ends at byte {end}, the file has {size}",
    ),
    "overlap": (
        raw_file({"a": info("F32", [2], 0, 8), "b": info("F32", [2], 4, 12)}, bytes(12)),
        ": tensor 'b' overlaps the one before it",
    ),
    "two names for the same bytes": (
        raw_file({"a": info("F32", [2], 0, 8), "b": info("F32", [2], 0, 8)}, bytes(8)),
        ": tensor 'b' overlaps the one before it",
    ),
    "hole": (
        raw_file({"a": info("F32", [2], 0, 8), "b": info("F32", [2], 12, 20)}, bytes(20)),
        ": 4 bytes before tensor 'b' belong to no tensor",
    ),
    "hole at the start": (
        raw_file({"a": info("F32", [2], 8, 16)}, bytes(16)),
        ": 8 bytes before tensor 'a' belong to no tensor",
    ),
    "bytes at the end": (
        raw_file(TWO, bytes(20)),
        ": 4 bytes at its end belong to no tensor",
    ),
    "name that is half a character": (
        raw_file(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        ": '\\ud800' can not be the name of a tensor",
    ),
    "name without end": (
        raw_file({"n" * 2000: info("U8", [1], 0, 1)}, b"x"),
        f": '{'n' * 157}...' can not be the name of a tensor",
    ),
    "name with a line in it": (
        raw_file({"a\nerror: b": info("U7", [1], 0, 1)}, b"x"),
        r": tensor 'a\nerror: b' has the unknown dtype 'U7'",
    ),
    "more dimensions than torch has": (
        raw_file({"a": info("U8", [1] * 65, 0, 1)}, b"x"),
        ": tensor 'a' has 65 dimensions",
    ),
}  # fmt: skip

# What safetensors itself takes (0.8, for the space, against the format's own text).
STRICTER = {
    "duplicate tensor",
    "header begins with a space",
    "name without end",
    "more dimensions than torch has",
}


def _one_line(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert "\n" not in caught.value.message + caught.value.hint
    assert caught.value.exit_code is ExitCode.CONFIGURATION
    return caught.value.message


@pytest.mark.parametrize("damage", FILES)
def test_damaged_file_is_one_line(damage: str, tmp_path: Path) -> None:
    data, line = FILES[damage]
    file = write_llama(tmp_path / "m") / "model.safetensors"
    file.write_bytes(data)
    header = int.from_bytes(data[:8], "little") if len(data) >= 8 else 0
    expected = line.replace("{size}", str(len(data))).replace("{end}", str(8 + header + 4000))
    assert _one_line(file.parent) == f"{file}{expected}"


@pytest.mark.parametrize("damage", sorted(FILES.keys() - STRICTER))
def test_safetensors_refuses_it_as_well(damage: str, tmp_path: Path) -> None:
    """Guards the table itself: none of these is a file that we refuse for no reason."""
    file = tmp_path / "x.safetensors"
    file.write_bytes(FILES[damage][0])
    with pytest.raises((SafetensorError, OSError, ValueError)):
        safe_open(file, "pt")


def test_truncated_shard_names_the_shard_and_a_tensor(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m", {"a": torch.ones(64), "b": torch.ones(64)}, shards=2)
    shard = path / "model-00002-of-00002.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, size - 1)
    assert _one_line(path) == f"{shard}: tensor 'b' ends at byte {size}, the file has {size - 1}"


def test_header_over_the_limit_is_not_read(tmp_path: Path) -> None:
    file = write_llama(tmp_path / "m") / "model.safetensors"
    file.write_bytes((100_000_001).to_bytes(8, "little"))
    os.truncate(file, 100_000_100)  # sparse
    expected = f"{file} says its header has 100000001 bytes, at most 100000000 are taken"
    assert _one_line(file.parent) == expected


def _remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def _index(weight_map: object) -> Callable[[Path], None]:
    return lambda path: write_index(path, weight_map)


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_text(text)


S1, S2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"

FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (_remove(S2), "{path}: shard " + S2 + " is missing"),
    "no config": (_remove("config.json"), "{path} is not a checkpoint: it has no config.json"),
    "config that is no JSON": (
        _write("config.json", "model_type: llama"),
        "{path}/config.json is not JSON: Expecting value: line 1 column 1 (char 0)",
    ),
    "config that is a list": (
        _write("config.json", "[]"),
        "{path}/config.json is not a JSON object",
    ),
    "config with a wrong type": (
        _write("config.json", '{"architectures": "Llama"}'),
        "{path}/config.json: expected `array | null`, got `str` - at `$.architectures`",
    ),
    "index without weight_map": (
        _write(INDEX, "{}"),
        "{path}/" + INDEX + " has no weight_map of names and files",
    ),
    "index with a number for a file": (
        _index({"a": 1}),
        "{path}/" + INDEX + " has no weight_map of names and files",
    ),
    "index naming an absent tensor": (
        _index({"a": S1, "b": S2, "c": S2}),
        "{path}/" + INDEX + ": tensor 'c' is not in " + S2,
    ),
    "index naming two absent tensors": (
        _index({"a": S1, "d": S2, "c": S2}),
        "{path}/" + INDEX + ": tensor 'c' and 1 more is not in " + S2,
    ),
    "index that leaves the folder": (
        _index({"a": "../x.safetensors"}),
        "{path}/" + INDEX + ": tensor 'a' is said to be in '../x.safetensors',"
        " which is no safetensors file of the folder",
    ),
    "index with an absolute path": (
        _index({"a": "/etc/x.safetensors"}),
        "{path}/" + INDEX + ": tensor 'a' is said to be in '/etc/x.safetensors',"
        " which is no safetensors file of the folder",
    ),
    "index naming a pickle": (
        _index({"a": "pytorch_model.bin"}),
        "{path}/" + INDEX + ": tensor 'a' is said to be in 'pytorch_model.bin',"
        " which is no safetensors file of the folder",
    ),
    "index of nothing": (_index({}), "{path} holds no tensors"),
    "index with a key twice": (
        _write(INDEX, '{"weight_map": {"a": "x", "a": "y"}}'),
        "{path}/" + INDEX + " has the key 'a' twice",
    ),
    "shards without index": (
        _remove(INDEX),
        "{path} has neither model.safetensors nor " + INDEX + ", only '" + S1 + "'",
    ),
}


@pytest.mark.parametrize("damage", FOLDERS)
def test_damaged_folder_is_one_line(damage: str, tmp_path: Path) -> None:
    change, line = FOLDERS[damage]
    path = write_checkpoint(tmp_path / "m", {"a": torch.ones(4), "b": torch.ones(4)}, shards=2)
    change(path)
    assert _one_line(path) == line.replace("{path}", str(path))


def test_absent_folder(tmp_path: Path) -> None:
    path = tmp_path / "absent"
    assert _one_line(path) == f"no checkpoint: {path}: no such file or directory"


def test_file_in_place_of_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert _one_line(path) == f"no checkpoint: {path}: not a directory"


def test_pickles_are_told_how_to_be_converted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.message == (
        f"{tmp_path} has neither model.safetensors nor {INDEX}, only 'pytorch_model.bin'"
    )
    assert caught.value.hint.startswith("convert it to safetensors: load it with transformers")


def test_gguf_alone_is_refused_as_a_method(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.Q4_1.gguf").touch()
    with pytest.raises(UnsupportedQuantForIPCError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.method == "gguf"
    assert caught.value.message == (
        f"{tmp_path} has neither model.safetensors nor {INDEX}, only 'model.Q4_1.gguf': weights"
        " quantized with GGUF can not be kept: its packed blocks are decoded by the kernels of one"
        " engine"
    )
    assert caught.value.hint == "convert it to safetensors: transformers can dequantize GGUF"


def test_adapter_is_not_a_model(tmp_path: Path) -> None:
    for name in ("config.json", "adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text(json.dumps({}))
    assert _one_line(tmp_path) == f"{tmp_path} is an adapter, not a whole model"


def test_fifo_does_not_hang_the_loader(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m")
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")
    assert _one_line(path) == f"{path / 'model.safetensors'} is not a regular file"


def test_dangling_link_is_a_missing_file(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m")
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to("blobs/gone")
    expected = f"{path / 'model.safetensors'} can not be read: no such file or directory"
    assert _one_line(path) == expected
