"""Identities that were computed before, for as long as no file of the checkpoint was touched."""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from wcache.checkpoint.folder import CONFIG, INDEX, SINGLE, Checkpoint
from wcache.checkpoint.header import stamp
from wcache.checkpoint.identity import SCHEME, Identity, identify, whole
from wcache.kept import KeptFolder
from wcache.manifest import ShardIdentity

SETTLED_NS = 2_000_000_000
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class FileState(msgspec.Struct, frozen=True):
    """What stat(2) says of a file. The change time is there because utimes(2) can not set it."""

    name: str
    nbytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @property
    def changed_ns(self) -> int:
        return max(self.mtime_ns, self.ctime_ns)


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the cache."""

    scheme: int
    folder: str
    files: tuple[FileState, ...]
    shards: tuple[ShardIdentity, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class IdentityCache:
    """A folder with one JSON file for each checkpoint.

    It saves time and is never needed: whatever is wrong with it, the checkpoint's samples are read
    again. An entry counts only while size, times, inode and device of all of the checkpoint's files
    are as they were, and when none of them was changed within two seconds before the checkpoint was
    opened: a file system's clock may stand still for so long, and then stat shows nothing of a
    write that came after the samples were read (the "racy" entries of git's index).
    """

    folder: Path
    keep: bool = True
    """Write what had to be computed. Not for a loader, whose sandbox has no place to write to."""

    def identify(self, checkpoint: Checkpoint) -> Identity:
        """As :func:`wcache.checkpoint.identity.identify`, from the cache where it has it."""
        before = _states(checkpoint)
        if before is None:
            return identify(checkpoint)
        settled = all(one.changed_ns < checkpoint.opened_ns - SETTLED_NS for one in before)
        if settled and (known := self._known(checkpoint, before)) is not None:
            return known
        found = identify(checkpoint)
        if self.keep and settled and _states(checkpoint) == before:
            self._store(checkpoint, before, found)
        return found

    def _known(self, checkpoint: Checkpoint, states: tuple[FileState, ...]) -> Identity | None:
        entry = self._load(checkpoint.path)
        if entry is None or entry.scheme != SCHEME or entry.folder != str(checkpoint.path):
            return None
        if entry.files != states:
            return None
        # The headers have been read by now: an entry that was damaged in part shows here.
        headers = tuple((file.name, file.nbytes, file.header) for file in checkpoint.files)
        if tuple((one.name, one.nbytes, one.header) for one in entry.shards) != headers:
            return None
        if not all(_DIGEST.fullmatch(one.sample) for one in entry.shards):
            return None
        if whole(checkpoint.config, entry.shards) != entry.digest:
            return None
        return Identity(entry.digest, entry.shards)

    def _load(self, path: Path) -> Entry | None:
        """The entry for the checkpoint in ``path``."""
        data = KeptFolder(self.folder).read(_name(path))
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(data, type=Entry) if data is not None else None
        return None

    def _store(
        self, checkpoint: Checkpoint, states: tuple[FileState, ...], found: Identity
    ) -> None:
        entry = Entry(SCHEME, str(checkpoint.path), states, found.shards, found.digest)
        with contextlib.suppress(UnicodeError):  # names of files need not be UTF-8
            data = msgspec.json.encode(entry)
            KeptFolder(self.folder).write(_name(checkpoint.path), data)


def _states(checkpoint: Checkpoint) -> tuple[FileState, ...] | None:
    """Of every file that the identity depends on, sorted by name; None when one can not be had."""
    try:
        return tuple(_state(checkpoint.path / name, name) for name in _names(checkpoint))
    except OSError:
        return None


def _names(checkpoint: Checkpoint) -> Iterator[str]:
    names = {CONFIG, *(file.name for file in checkpoint.files)}
    # The index says which tensors are taken from which shard; a single file needs none.
    if names != {CONFIG, SINGLE}:
        names.add(INDEX)
    yield from sorted(names)


def _state(path: Path, name: str) -> FileState:
    status = path.stat()
    device, inode, nbytes, mtime_ns = stamp(status)
    return FileState(name, nbytes, mtime_ns, status.st_ctime_ns, inode, device)


def _name(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
