"""A cache of identities that somebody else wrote, or that was damaged, decides nothing."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import llama_tensors, write_checkpoint
from wcache import kept
from wcache.checkpoint import Checkpoint, Identity, IdentityCache, identify, open_checkpoint
from wcache.checkpoint import identities as module

pytestmark = pytest.mark.hostile

FORGED = "sha256:" + "0" * 64


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """As it is opened in ten seconds from now, when its files are not new any more."""
    path = write_checkpoint(tmp_path / "m", llama_tensors(), shards=2)
    return replace(open_checkpoint(path), opened_ns=time.time_ns() + 10**10)


@pytest.fixture
def entry(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A good entry for it."""
    IdentityCache(tmp_path / "identity").identify(checkpoint)
    (entry,) = (tmp_path / "identity").iterdir()
    return entry


def asked(checkpoint: Checkpoint, entry: Path) -> Identity:
    """What the cache says with the entry as it is now; it is not written again."""
    return IdentityCache(entry.parent, keep=False).identify(checkpoint)


def edited(entry: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(entry.read_text())
    change(content)
    entry.write_text(json.dumps(content))


def forge_sample(content: dict[str, Any]) -> None:
    content["shards"][0]["sample"] = FORGED


def forge_header(content: dict[str, Any]) -> None:
    content["shards"][0]["header"] = FORGED


CHANGES: list[Callable[[dict[str, Any]], None]] = [
    lambda content: content.update(digest=FORGED),
    forge_sample,
    forge_header,
    lambda content: content.update(shards=[]),
    lambda content: content["shards"].pop(),
    lambda content: content["shards"].reverse(),
    lambda content: content.update(files=[]),
    lambda content: content["files"].pop(),
    lambda content: content["files"].append(content["files"][0]),
    lambda content: content["files"][0].update(name="../config.json"),
    lambda content: content["files"][0].update(mtime_ns=-1),
    lambda content: content["files"][0].update(inode=2**80),
    lambda content: content.update(scheme=2),
    lambda content: content.update(folder="/elsewhere"),
    lambda content: content.update(unknown=1),
    lambda content: content.pop("digest"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_an_entry_that_was_edited_decides_nothing(
    checkpoint: Checkpoint, entry: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    edited(entry, change)
    assert asked(checkpoint, entry) == identify(checkpoint)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 200_000, b'{"scheme":1}', b"\0" * 4096],
)
def test_what_is_no_entry_decides_nothing(
    checkpoint: Checkpoint, entry: Path, content: bytes
) -> None:
    entry.write_bytes(content)
    assert asked(checkpoint, entry) == identify(checkpoint)


def test_half_an_entry_is_written_anew(checkpoint: Checkpoint, entry: Path) -> None:
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2])
    assert IdentityCache(entry.parent).identify(checkpoint) == identify(checkpoint)
    assert entry.read_bytes() == whole


def test_an_entry_without_end_is_not_read_to_it(
    checkpoint: Checkpoint, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "MAX_ENTRY_BYTES", 1 << 20)
    os.truncate(entry, 1 << 40)
    assert asked(checkpoint, entry) == identify(checkpoint)


# --- whose entry it is: one that would be believed if it were ours --------------------------------


@pytest.fixture
def believed(
    checkpoint: Checkpoint, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], bool]:
    """True when the entry is taken for the identity, so that no sample is read."""
    computed: list[Checkpoint] = []

    def computing(checkpoint: Checkpoint) -> Identity:
        computed.append(checkpoint)
        return identify(checkpoint)

    monkeypatch.setattr(module, "identify", computing)

    def ask() -> bool:
        computed.clear()
        asked(checkpoint, entry)
        return not computed

    assert ask()
    return ask


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_an_entry_that_others_may_write_to_is_ignored(
    entry: Path, believed: Callable[[], bool], mode: int
) -> None:
    entry.chmod(mode)
    assert not believed()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_to_is_ignored(
    entry: Path, believed: Callable[[], bool], mode: int
) -> None:
    entry.parent.chmod(mode)
    assert not believed()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_an_entry_of_another_user_is_ignored(entry: Path, believed: Callable[[], bool]) -> None:
    os.chown(entry, 12345, -1)
    assert not believed()
    os.chown(entry, 0, -1)
    assert believed()
    os.chown(entry.parent, 12345, -1)
    assert not believed()


def test_links_are_not_followed(entry: Path, believed: Callable[[], bool]) -> None:
    entry.rename(entry.with_suffix(".real"))
    entry.symlink_to(entry.with_suffix(".real"))
    assert not believed()


def test_a_folder_that_is_a_link_is_not_followed(entry: Path, believed: Callable[[], bool]) -> None:
    folder = entry.parent
    folder.rename(folder.with_name("real"))
    folder.symlink_to(folder.with_name("real"))
    assert not believed()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
def test_what_is_no_file_is_ignored(
    entry: Path, believed: Callable[[], bool], make: Callable[[Path], None]
) -> None:
    entry.unlink()
    make(entry)
    assert not believed()


def test_nothing_is_written_into_a_folder_of_everybody(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    IdentityCache(folder).identify(checkpoint)
    assert list(folder.iterdir()) == []
