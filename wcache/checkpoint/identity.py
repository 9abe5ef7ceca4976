"""The identity of a checkpoint: what tells it from every other without reading all of it."""

import contextlib
import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from wcache.checkpoint.document import open_file, read_exactly
from wcache.checkpoint.folder import Checkpoint, CheckpointConfig
from wcache.checkpoint.header import CheckpointFile, TensorEntry, stamp
from wcache.errors import CheckpointError
from wcache.manifest import ShardIdentity

SCHEME = 1
"""How a digest is made; another number makes other digests of the same checkpoint."""
SAMPLE_BYTES = 4096
# Files that are sampled side by side, for file systems that pass over what they are advised.
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Identity:
    """Two checkpoints with equal digests hold the same model."""

    digest: str
    """``sha256:`` and 64 hexadecimal digits."""
    shards: tuple[ShardIdentity, ...]


def identify(checkpoint: Checkpoint) -> Identity:
    """Digests config.json and, of every file, its header, its size and samples of its content.

    Headers alone would take a fine-tune for its base model (vllm #59647), so a block from the
    middle of every tensor is read as well: training moves all tensors. Raises
    :class:`CheckpointError` when a file is not the one whose header was read. What that costs:
    ``scripts/bench_fingerprint.py``.
    """
    by_file: dict[str, list[tuple[str, TensorEntry]]] = {file.name: [] for file in checkpoint.files}
    for name, entry in checkpoint.tensors.items():
        by_file[entry.file].append((name, entry))

    def shard(file: CheckpointFile) -> ShardIdentity:
        sample = _sample(checkpoint, file, by_file[file.name])
        return ShardIdentity(name=file.name, nbytes=file.nbytes, header=file.header, sample=sample)

    with ThreadPoolExecutor(min(_AT_ONCE, len(checkpoint.files))) as pool:
        shards = tuple(pool.map(shard, checkpoint.files))
    return Identity(whole(checkpoint.config, shards), shards)


def whole(config: CheckpointConfig, shards: tuple[ShardIdentity, ...]) -> str:
    """The digest of a checkpoint of these parts."""
    digest = hashlib.sha256(f"wcache checkpoint {SCHEME}\0".encode())
    digest.update(hashlib.sha256(config.data).digest())
    digest.update(msgspec.json.encode(shards))
    return "sha256:" + digest.hexdigest()


def diff(old: Iterable[ShardIdentity], new: Iterable[ShardIdentity]) -> tuple[str, ...]:
    """Names of the shards that are in one of the two only, or differ; sorted."""
    before = {shard.name: shard for shard in old}
    after = {shard.name: shard for shard in new}
    return tuple(
        sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    )


def open_unchanged(checkpoint: Checkpoint, file: CheckpointFile) -> int:
    """A descriptor of ``file``; raises :class:`CheckpointError` when it was replaced since."""
    path = checkpoint.path / file.name
    fd, status = open_file(path)
    if stamp(status) != file.stamp:
        os.close(fd)
        raise changed(checkpoint, file)
    return fd


def check_unchanged(checkpoint: Checkpoint, file: CheckpointFile, fd: int) -> None:
    """Raises :class:`CheckpointError` when ``fd`` was written to since its header was read."""
    if stamp(os.fstat(fd)) != file.stamp:
        raise changed(checkpoint, file)


def changed(checkpoint: Checkpoint, file: CheckpointFile) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.path / file.name} changed while it was read",
        hint="wait until the checkpoint is complete, then load again",
    )


def _sample(
    checkpoint: Checkpoint, file: CheckpointFile, entries: list[tuple[str, TensorEntry]]
) -> str:
    path = checkpoint.path / file.name
    digest = hashlib.sha256()
    fd = open_unchanged(checkpoint, file)
    # What a sample does not show, such as a few rows that were edited, changes the time: a doubt is
    # a mismatch. A copy that keeps times (cp -p, rsync -t) is the same checkpoint.
    digest.update(file.stamp[3].to_bytes(16, "little", signed=True))
    places = [(name, *_place(entry)) for name, entry in entries]
    try:
        _announce(fd, [(start, length) for _, start, length in places if length])
        for name, start, length in places:
            # The name is in it because the index decides which of a file's tensors are taken.
            encoded = name.encode()
            digest.update(len(encoded).to_bytes(4, "little") + encoded)
            digest.update(read_exactly(fd, length, start, path))
        check_unchanged(checkpoint, file, fd)
    finally:
        os.close(fd)
    return "sha256:" + digest.hexdigest()


def _announce(fd: int, places: Iterable[tuple[int, int]]) -> None:
    """Has the kernel read all of ``places``, none of them empty, while the first is waited for.

    A disk with a full queue answers several times as fast as one that is asked for a block after
    the other. A length of 0 would mean the rest of the file.
    """
    with contextlib.suppress(OSError):  # advice is all it is
        for start, length in places:
            os.posix_fadvise(fd, start, length, os.POSIX_FADV_WILLNEED)


def _place(entry: TensorEntry) -> tuple[int, int]:
    """Offset and length of a tensor's sample."""
    length = min(SAMPLE_BYTES, entry.nbytes)
    return entry.start + (entry.nbytes - length) // 2, length
