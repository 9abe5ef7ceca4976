"""The identity of a checkpoint: what tells it from every other without reading all of it."""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from wcache.checkpoint.document import open_file, read_exactly
from wcache.checkpoint.folder import Checkpoint
from wcache.checkpoint.header import CheckpointFile, TensorEntry, stamp
from wcache.errors import CheckpointError
from wcache.manifest import ShardIdentity

SAMPLE_BYTES = 4096


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
    :class:`CheckpointError` when a file is not the one whose header was read.
    """
    by_file: dict[str, list[tuple[str, TensorEntry]]] = {file.name: [] for file in checkpoint.files}
    for name, entry in checkpoint.tensors.items():
        by_file[entry.file].append((name, entry))
    shards = tuple(
        ShardIdentity(
            name=file.name,
            nbytes=file.nbytes,
            header=file.header,
            sample=_sample(checkpoint, file, by_file[file.name]),
        )
        for file in checkpoint.files
    )
    whole = hashlib.sha256(b"wcache checkpoint 1\0")
    whole.update(hashlib.sha256(checkpoint.config.data).digest())
    whole.update(msgspec.json.encode(shards))
    return Identity("sha256:" + whole.hexdigest(), shards)


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
    try:
        for name, entry in entries:
            length = min(SAMPLE_BYTES, entry.nbytes)
            start = entry.start + (entry.nbytes - length) // 2
            # The name is in it because the index decides which of a file's tensors are taken.
            encoded = name.encode()
            digest.update(len(encoded).to_bytes(4, "little") + encoded)
            digest.update(read_exactly(fd, length, start, path))
    finally:
        os.close(fd)
    return "sha256:" + digest.hexdigest()
