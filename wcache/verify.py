"""Answers "are these bytes the right bytes" for a rank: its descriptors, its files, its content."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from wcache import manifest as manifests
from wcache.checkpoint import Identity, diff, identify, open_checkpoint
from wcache.config import Config
from wcache.control import Control
from wcache.errors import CheckpointError, ExitCode, ManifestError, ProtocolError
from wcache.fingerprint import compare, wanted_by
from wcache.manifest import MAX_MANIFEST_BYTES, Manifest
from wcache.memory.descriptor import check_descriptor
from wcache.memory.memfd import read_sealed
from wcache.memory.slab import Access, Slab
from wcache.output import counted
from wcache.paths import RankPaths
from wcache.protocol import Attach, Attached
from wcache.ranks import brief
from wcache.units import size
from wcache.wire import close_all

CheckName = Literal["weights", "manifest", "descriptors", "configuration", "checkpoint", "digests"]
Outcome = Literal["ok", "warning", "bad", "skipped"]
"""``skipped``: a rank that has no weights to check."""


_MAX_NAMES = 5
# Digests are computed for so many bytes at a time, so that progress can be shown in between.
_BATCH_BYTES = 1 << 30


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one check of one rank found."""

    rank: int
    check: CheckName
    result: Outcome
    detail: str


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of ``verify --json``."""

    version: int = 1
    instance: str
    depth: Literal["quick", "digest"]
    results: tuple[Result, ...]

    @property
    def exit_code(self) -> ExitCode:
        outcomes = {result.result for result in self.results}
        if "bad" in outcomes:
            return ExitCode.MISMATCH
        return ExitCode.NOT_READY if "skipped" in outcomes else ExitCode.DONE


Progress = Callable[[int, int], None]
"""Called with the bytes that are done and all bytes."""


@dataclass(frozen=True, slots=True)
class Held:
    """A lease on the served generation, for as long as it is looked at."""

    attached: Attached
    manifest_fd: int
    slab_fds: list[int]


class Verifier:
    """Verifies ranks of one instance; files on disk are looked at once for all of them."""

    def __init__(self, config: Config | None) -> None:
        """Without a ``config`` the weights are compared with what they say of themselves."""
        self._config = config
        self._identities: dict[str, Identity | CheckpointError] = {}

    def verify(self, paths: RankPaths, *, quick: bool, progress: Progress) -> Iterator[Result]:
        """Yields the result of each check.

        Raises :class:`wcache.errors.NotReadyError` when the rank has no weights, and
        :class:`wcache.errors.NoSuchRankError` when it has no daemon.
        """
        rank = paths.id.rank
        with _attached(paths) as held:
            manifest, problem = _manifest(held)
            if manifest is None:
                yield Result(rank=rank, check="manifest", result="bad", detail=problem)
                return
            yield _ok(
                rank,
                "manifest",
                f"generation {held.attached.generation}: {len(manifest.tensors)} tensors in"
                f" {len(manifest.storages)} storages",
            )
            descriptors = _descriptors(rank, held)
            yield descriptors
            if self._config is not None:
                yield _configuration(rank, manifest, self._config)
            if manifest.checkpoint:
                yield self._checkpoint(rank, manifest)
            # What is no slab can not be mapped, so nothing can be said of its content.
            if not quick and descriptors.result == "ok":
                yield _digests(rank, held, manifest, progress)

    def _checkpoint(self, rank: int, manifest: Manifest) -> Result:
        """Compares the files on disk with those that were loaded."""
        folder = self._config.model.path if self._config else manifest.fingerprint.model
        if folder is None or not Path(folder).is_absolute():
            return Result(
                rank=rank, check="checkpoint", result="warning",
                detail="it is not known where the files lie that were loaded",
            )  # fmt: skip
        found = self._identify(folder)
        if isinstance(found, CheckpointError):
            # What was loaded can not be compared with files that are not there: the weights that
            # are served may well be right.
            names = [shard.name for shard in manifest.checkpoint]
            gone = not any(Path(folder, name).exists() for name in names)
            return Result(
                rank=rank,
                check="checkpoint",
                result="warning" if gone else "bad",
                detail=f"what was loaded from {folder} is not there any more"
                if gone
                else found.message,
            )
        if changed := diff(manifest.checkpoint, found.shards):
            detail = f"{folder}: differs from what was loaded: {_some(changed)}"
            return Result(rank=rank, check="checkpoint", result="bad", detail=detail)
        if manifest.fingerprint.content not in (None, found.digest):
            detail = f"{folder}: config.json differs from what was loaded"
            return Result(rank=rank, check="checkpoint", result="bad", detail=detail)
        return _ok(
            rank, "checkpoint", f"{folder} is what was loaded: {counted(len(found.shards), 'file')}"
        )

    def _identify(self, folder: str) -> Identity | CheckpointError:
        if folder not in self._identities:
            try:
                self._identities[folder] = identify(open_checkpoint(Path(folder)))
            except CheckpointError as error:
                self._identities[folder] = error
        return self._identities[folder]


@contextmanager
def _attached(paths: RankPaths) -> Iterator[Held]:
    with Control.connect(paths, "client") as control:
        attached = control.request(Attach(), Attached)
        fds = control.channel.take_fds(1 + len(attached.slabs))
        try:
            yield Held(attached, fds[0], fds[1:])
        finally:
            close_all(fds)


def _manifest(held: Held) -> tuple[Manifest | None, str]:
    """The manifest, or None and why it is not to be believed."""
    try:
        data = read_sealed(held.manifest_fd, MAX_MANIFEST_BYTES)
        if manifests.digest(data) != held.attached.manifest_digest:
            return None, "its digest is not the one that the daemon gave"
        manifest = manifests.decode(data)
        if manifest.slabs != held.attached.slabs:
            return None, "it names other slabs than the daemon"
        manifests.check(manifest, range_bytes=sum(slab.nbytes for slab in manifest.slabs))
    except (ManifestError, ProtocolError) as error:
        return None, error.message
    return manifest, ""


def _descriptors(rank: int, held: Held) -> Result:
    slabs = held.attached.slabs
    for index, (fd, info) in enumerate(zip(held.slab_fds, slabs, strict=True)):
        try:
            check_descriptor(fd, info)
        except ProtocolError as error:
            detail = f"slab {index}: {error.message}"
            return Result(rank=rank, check="descriptors", result="bad", detail=detail)
    total = size(sum(slab.nbytes for slab in slabs))
    return _ok(rank, "descriptors", f"{counted(len(slabs), 'slab')} with {total}")


def _configuration(rank: int, manifest: Manifest, config: Config) -> Result:
    if rank >= config.ranks.world_size:
        detail = "the rank is not part of the configuration"
        return Result(rank=rank, check="configuration", result="warning", detail=detail)
    if found := compare(manifest.fingerprint, wanted_by(config, rank)):
        detail = "; ".join(map(brief, found))
        return Result(rank=rank, check="configuration", result="bad", detail=detail)
    return _ok(rank, "configuration", "the weights are the wanted ones")


def _digests(rank: int, held: Held, manifest: Manifest, progress: Progress) -> Result:
    """Computes every storage's digest anew, where the bytes are."""
    from wcache.memory import open_memory
    from wcache.memory.digest import ALGORITHM, digests

    info = manifest.slabs[0]
    device: Literal["cpu", "cuda"] = "cuda" if info.kind == "cuda" else "cpu"
    memory = open_memory(device, device_uuid=info.device_uuid)
    slabs = [Slab(fd, slab) for fd, slab in zip(held.slab_fds, manifest.slabs, strict=True)]
    mapping = memory.map(slabs, Access.READ)
    try:
        data = mapping.tensor()
        bad: list[int] = []
        done, total = 0, manifest.weight_bytes
        progress(done, total)
        for batch in _batches(manifest):
            storages = [manifest.storages[index] for index in batch]
            runs = (data[one.offset : one.offset + one.nbytes] for one in storages)
            for index, one, computed in zip(batch, storages, digests(runs), strict=True):
                if one.digest != computed:
                    bad.append(index)
            done += sum(one.nbytes for one in storages)
            progress(done, total)
        del data
    finally:
        mapping.close()
    if not bad:
        detail = f"{len(manifest.storages)} storages with {size(total)} have their {ALGORITHM}"
        return _ok(rank, "digests", detail)
    parts = [f"storage {index} ({_some(_names(manifest, index))})" for index in bad[:_MAX_NAMES]]
    more = f" and {len(bad) - _MAX_NAMES} more" if len(bad) > _MAX_NAMES else ""
    detail = "bytes are not those that were published: " + ", ".join(parts) + more
    return Result(rank=rank, check="digests", result="bad", detail=detail)


def _batches(manifest: Manifest) -> Iterator[list[int]]:
    """Indices of storages, about :data:`_BATCH_BYTES` at a time."""
    batch: list[int] = []
    nbytes = 0
    for index, storage in enumerate(manifest.storages):
        batch.append(index)
        nbytes += storage.nbytes
        if nbytes >= _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _names(manifest: Manifest, storage: int) -> list[str]:
    return [tensor.name for tensor in manifest.tensors if tensor.storage == storage]


def _some(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more if names else "no tensor"


def _ok(rank: int, check: CheckName, detail: str) -> Result:
    return Result(rank=rank, check=check, result="ok", detail=detail)
