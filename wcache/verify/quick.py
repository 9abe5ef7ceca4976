"""The checks for which nothing is mapped: manifest, descriptors, configuration, files on disk."""

import os
from pathlib import Path

from wcache.checkpoint import Identity, diff, identify, open_checkpoint
from wcache.config import Config
from wcache.difference import brief
from wcache.errors import CheckpointError, ProtocolError
from wcache.fingerprint import compare, wanted_by
from wcache.manifest import Manifest
from wcache.memory.descriptor import check_descriptor
from wcache.output import counted
from wcache.units import size
from wcache.verify.held import Held
from wcache.verify.result import Result, some


def manifest(rank: int, one: Held, found: Manifest) -> Result:
    return Result(
        rank=rank, check="manifest", result="ok",
        detail=f"generation {one.attached.generation}: {len(found.tensors)} tensors in"
        f" {len(found.storages)} storages",
    )  # fmt: skip


def descriptors(rank: int, one: Held) -> Result:
    slabs = one.attached.slabs
    for index, (fd, info) in enumerate(zip(one.slab_fds, slabs, strict=True)):
        try:
            check_descriptor(fd, info)
        except ProtocolError as error:
            detail = f"slab {index}: {error.message}"
            return Result(rank=rank, check="descriptors", result="bad", detail=detail)
    total = size(sum(slab.nbytes for slab in slabs))
    detail = f"{counted(len(slabs), 'slab')} with {total}"
    return Result(rank=rank, check="descriptors", result="ok", detail=detail)


def configuration(rank: int, found: Manifest, config: Config) -> Result:
    if rank >= config.ranks.world_size:
        detail = "the rank is not part of the configuration"
        return Result(rank=rank, check="configuration", result="warning", detail=detail)
    if differences := compare(found.fingerprint, wanted_by(config, rank)):
        detail = "; ".join(map(brief, differences))
        return Result(rank=rank, check="configuration", result="bad", detail=detail)
    detail = "the weights are the wanted ones"
    return Result(rank=rank, check="configuration", result="ok", detail=detail)


class Files:
    """The checkpoints on disk, each looked at once for all ranks."""

    def __init__(self, config: Config | None) -> None:
        self._config = config
        self._identities: dict[str, Identity | CheckpointError] = {}

    def folder(self, found: Manifest) -> Path | None:
        """Where the files should lie that were loaded; None where that is not known."""
        name = self._config.model.path if self._config else found.fingerprint.model
        return Path(name) if name is not None and Path(name).is_absolute() else None

    def check(self, rank: int, found: Manifest) -> Result:
        """Compares the files on disk with those that were loaded."""
        folder = self.folder(found)
        if folder is None:
            return Result(
                rank=rank, check="checkpoint", result="warning",
                detail="it is not known where the files lie that were loaded",
            )  # fmt: skip
        identity = self._identify(str(folder))
        if isinstance(identity, CheckpointError):
            # What was loaded can not be compared with files that are not there: the weights that
            # are served may well be right.
            files = [folder / shard.name for shard in found.checkpoint]
            if any(map(_is_denied, (folder, *files))):
                detail = f"{folder} can not be read by this user"
                return Result(rank=rank, check="checkpoint", result="skipped", detail=detail)
            gone = not any(path.exists() for path in files)
            return Result(
                rank=rank,
                check="checkpoint",
                result="warning" if gone else "bad",
                detail=f"what was loaded from {folder} is not there any more"
                if gone
                else identity.message,
            )
        if changed := diff(found.checkpoint, identity.shards):
            detail = f"{folder}: differs from what was loaded: {some(changed)}"
            return Result(rank=rank, check="checkpoint", result="bad", detail=detail)
        if found.fingerprint.content not in (None, identity.digest):
            detail = f"{folder}: config.json differs from what was loaded"
            return Result(rank=rank, check="checkpoint", result="bad", detail=detail)
        detail = f"{folder} is what was loaded: {counted(len(identity.shards), 'file')}"
        return Result(rank=rank, check="checkpoint", result="ok", detail=detail)

    def _identify(self, folder: str) -> Identity | CheckpointError:
        if folder not in self._identities:
            try:
                self._identities[folder] = identify(open_checkpoint(Path(folder)))
            except CheckpointError as error:
                self._identities[folder] = error
        return self._identities[folder]


def _is_denied(path: Path) -> bool:
    """Whether ``path`` is there, or may be, and this user can not read it."""
    try:
        path.stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return not os.access(path, os.R_OK)
