"""Which parts of a checkpoint's files are read ahead, and that they are."""

import os
from pathlib import Path

import pytest

from wcache.checkpoint import TensorEntry
from wcache.checkpoint.readahead import CHUNK_BYTES, file_ranges, read_ahead, total_bytes
from wcache.errors import CheckpointError

pytestmark = pytest.mark.unit


def entry(start: int, nbytes: int, file: str = "a") -> TensorEntry:
    return TensorEntry(file=file, dtype="U8", shape=(nbytes,), start=start, nbytes=nbytes)


def test_ranges_are_joined_where_they_touch_and_counted_once() -> None:
    found = file_ranges([
        entry(100, 10), entry(80, 20), entry(80, 20), entry(200, 5), entry(300, 0),
        entry(0, 7, "b"),
    ])  # fmt: skip
    assert found == {"a": [(80, 110), (200, 205)], "b": [(0, 7)]}
    assert total_bytes(found) == 42


def test_every_byte_is_read_and_told(tmp_path: Path) -> None:
    size = 2 * CHUNK_BYTES + 5
    (tmp_path / "a").write_bytes(bytes(size))
    (tmp_path / "b").write_bytes(bytes(9))
    told: list[int] = []
    read_ahead(tmp_path, {"a": [(1, size)], "b": [(0, 9)]}, told.append)
    assert told == sorted(told)
    assert told[-1] == size - 1 + 9


def test_a_file_that_has_become_shorter_is_said(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    with pytest.raises(CheckpointError, match="ends at byte 10"):
        read_ahead(tmp_path, {"a": [(0, 11)]}, lambda _: None)


def test_a_file_that_is_gone_is_said_and_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count, of links that end at once
    with pytest.raises(CheckpointError, match="no such file"):
        read_ahead(tmp_path, {"a": [(0, 10)], "gone": [(0, 1)]}, lambda _: None)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - as above
