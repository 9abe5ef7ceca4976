"""The identity of a checkpoint is found out once, and again when any of its files was touched."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoints import llama_tensors, write_checkpoint, write_llama
from wcache import kept
from wcache.checkpoint import Checkpoint, Identity, IdentityCache, identify, open_checkpoint
from wcache.checkpoint import identities as module

pytestmark = pytest.mark.unit

LATER_NS = 10**10
INDEX = "model.safetensors.index.json"


class Counted:
    """The cache, and how many times it had to read samples."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = IdentityCache(folder)
        self.computed = 0
        self.after_ns = LATER_NS

        def computing(checkpoint: Checkpoint) -> Identity:
            self.computed += 1
            return identify(checkpoint)

        monkeypatch.setattr(module, "identify", computing)

    def __call__(self, path: Path, *, cache: IdentityCache | None = None) -> Identity:
        """Asks ten seconds from now: files of a test have just been written."""
        opened_ns = time.time_ns() + self.after_ns
        checkpoint = replace(open_checkpoint(path), opened_ns=opened_ns)
        return (cache or self.cache).identify(checkpoint)


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(tmp_path / "state" / "identity", monkeypatch)


@pytest.fixture(params=[1, 3], ids=["one file", "three shards"])
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return write_checkpoint(tmp_path / "m", llama_tensors(), shards=request.param)


def test_what_was_found_out_is_not_read_again(counted: Counted, model: Path) -> None:
    first = counted(model)
    assert counted(model) == first == identify(open_checkpoint(model))
    assert counted.computed == 1


def shards(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def keeps_its_time(file: Path, change: Callable[[bytes], bytes]) -> None:
    """As ``touch -r`` after an edit."""
    status = file.stat()
    file.write_bytes(change(file.read_bytes()))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def with_other_weights(model: Path) -> None:
    keeps_its_time(shards(model)[-1], lambda data: data[:-8] + bytes(8))


def with_a_new_time(model: Path) -> None:
    os.utime(shards(model)[0])


def with_a_copy_in_its_place(model: Path) -> None:
    file, status = shards(model)[0], shards(model)[0].stat()
    other = file.with_suffix(".new")
    other.write_bytes(file.read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(file)


def with_another_config(model: Path) -> None:
    keeps_its_time(model / "config.json", lambda data: data.replace(b"48", b"49"))


@pytest.mark.parametrize(
    "touch",
    [with_other_weights, with_a_new_time, with_a_copy_in_its_place, with_another_config],
)
def test_a_file_that_was_touched_is_read_again(
    counted: Counted, model: Path, touch: Callable[[Path], None]
) -> None:
    counted(model)
    touch(model)
    assert counted(model) == identify(open_checkpoint(model))
    assert counted.computed == 2


def test_an_index_that_was_written_again_is_read_again(counted: Counted, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m", llama_tensors(), shards=2)
    counted(model)
    keeps_its_time(model / INDEX, lambda data: data)
    counted(model)
    assert counted.computed == 2


def test_a_single_file_that_appears_beside_the_shards_counts(
    counted: Counted, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "m", llama_tensors(), shards=2)
    before = counted(model)
    write_llama(model)
    assert counted(model).digest != before.digest


def test_a_file_that_was_written_a_moment_ago_is_not_trusted(counted: Counted, model: Path) -> None:
    """Its time may stand still while it is written to again."""
    counted.after_ns = 10**9
    counted(model)
    counted(model)
    assert counted.computed == 2
    assert not counted.cache.folder.exists()
    counted.after_ns = LATER_NS
    counted(model)
    os.utime(shards(model)[0], ns=(1, time.time_ns() + 2 * LATER_NS))
    counted(model)
    counted(model)
    assert counted.computed == 5


def test_a_checkpoint_that_was_opened_nobody_knows_when_is_not_cached(
    counted: Counted, model: Path
) -> None:
    checkpoint = replace(open_checkpoint(model), opened_ns=0)
    counted.cache.identify(checkpoint)
    assert not counted.cache.folder.exists()


def test_a_file_that_changes_while_it_is_sampled_is_not_kept(
    counted: Counted, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(checkpoint: Checkpoint) -> Identity:
        found = identify(checkpoint)
        with_another_config(model)
        return found

    monkeypatch.setattr(module, "identify", late)
    counted(model)
    assert not counted.cache.folder.exists()


def test_each_folder_has_an_entry_of_its_own(counted: Counted, tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path / "a", {"w": torch.zeros(9)})
    other = write_checkpoint(tmp_path / "b", {"w": torch.ones(9)})
    digests = {counted(one).digest, counted(other).digest}
    assert {counted(one).digest, counted(other).digest} == digests
    assert counted.computed == len(digests) == 2


def test_a_loader_reads_and_never_writes(counted: Counted, model: Path) -> None:
    reading = IdentityCache(counted.cache.folder, keep=False)
    counted(model, cache=reading)
    assert not counted.cache.folder.exists()
    counted(model)
    counted(model, cache=reading)
    assert counted.computed == 2


def test_the_cache_is_bounded(
    counted: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "MAX_ENTRIES", 3)
    for number in range(5):
        counted(write_checkpoint(tmp_path / str(number), {"w": torch.ones(1)}))
    leftover = counted.cache.folder / f".{'0' * 32}.json.x"
    leftover.touch()
    os.utime(leftover, (0, 0))
    counted(write_checkpoint(tmp_path / "6", {"w": torch.ones(1)}))
    assert len(list(counted.cache.folder.iterdir())) == 3


def test_only_its_owner_may_look_into_it(counted: Counted, model: Path) -> None:
    old = os.umask(0)
    try:
        counted(model)
    finally:
        os.umask(old)
    (entry,) = counted.cache.folder.iterdir()
    assert counted.cache.folder.stat().st_mode & 0o777 == 0o700
    assert entry.stat().st_mode & 0o777 == 0o600


def test_a_place_that_can_not_be_written_to_is_no_fault(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    checkpoint = replace(open_checkpoint(model), opened_ns=time.time_ns() + LATER_NS)
    cache = IdentityCache(tmp_path / "file" / "identity")
    assert cache.identify(checkpoint) == identify(checkpoint)
