"""The check against a fresh load: every tensor of a rank compared with what is on disk."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from wcache.config import Config
from wcache.errors import WcacheError
from wcache.fingerprint import compare as compare_fingerprints
from wcache.fingerprint import wanted_by
from wcache.manifest import Manifest, Tensor
from wcache.output import counted
from wcache.units import size
from wcache.verify.fresh import Fresh, comes_from_disk
from wcache.verify.held import gpu_room
from wcache.verify.result import Outcome, Progress, Result, TensorDifference

if TYPE_CHECKING:
    import torch

_FIELDS = ("dtype", "shape", "stride", "storage_offset", "kind", "persistent", "tied_to")
_MAX_TOLD = 20
_SHOWN_BYTES = 8
# What is compared at a time; on a GPU so much of the fresh bytes is copied there.
_CHUNK_BYTES = 16 << 20


def parity(
    rank: int,
    manifest: Manifest,
    content: "torch.Tensor",
    config: Config | None,
    folder: Path | None,
    progress: Progress,
) -> Iterator[Result]:
    """Compares ``content``, the slabs as uint8[n], with a fresh load from ``folder``."""
    reason = _why_not(rank, manifest, config, folder)
    if reason or config is None or folder is None:
        yield _result(rank, "skipped", reason)
        return
    try:
        fresh = Fresh.of(folder, config, rank)
        found = tuple(compare(manifest, content, fresh, progress))
    except WcacheError as error:
        yield _result(rank, "skipped", f"there is no fresh load to compare with: {error.message}")
        return
    if not found:
        tensors = counted(len(manifest.tensors), "tensor")
        yield _result(
            rank, "ok",
            f"{tensors} as a fresh load makes them, byte for byte: {size(manifest.weight_bytes)}",
        )  # fmt: skip
        return
    for difference in found[:_MAX_TOLD]:
        yield _result(rank, "bad", str(difference), (difference,))
    if len(found) > _MAX_TOLD:
        rest = found[_MAX_TOLD:]
        yield _result(rank, "bad", f"{counted(len(rest), 'more difference')}", rest)


def compare(
    manifest: Manifest, content: "torch.Tensor", fresh: Fresh, progress: Progress
) -> Iterator[TensorDifference]:
    """Yields every difference: of description first, then of bytes.

    Raises :class:`wcache.errors.CheckpointError` when the files can not be read, and
    :class:`wcache.errors.OutOfMemoryError` when there is no room to.
    """
    cached = {tensor.name: tensor for tensor in manifest.tensors}
    expected = fresh.tensors()
    for name in sorted(cached.keys() - expected.keys()):
        yield _difference(name, "name", "there", "absent")
    for name in sorted(expected.keys() - cached.keys()):
        yield _difference(name, "name", "absent", "there")
    both = [name for name in expected if name in cached]
    for name in both:
        yield from _described(cached[name], expected[name])
    for key, value in sorted(manifest.extras.items()):
        yield _difference(key, "extra", repr(value)[:80], "absent")
    # A storage that is shared is read under the name of its owner.
    owners = {name for name in both if expected[name].tied_to is None}
    total = sum(target.nbytes for target in fresh.plan.stored if target.name in owners)
    progress("parity", 0, total)

    def advance(done: int) -> None:
        progress("parity", min(done, total), total)

    with gpu_room():
        for name, bytes_read in fresh.read(owners, advance):
            storage = manifest.storages[cached[name].storage]
            here = content[storage.offset : storage.offset + storage.nbytes]
            if difference := _bytes(name, here, bytes_read):
                yield difference


def _described(cached: Tensor, fresh: Tensor) -> Iterator[TensorDifference]:
    for field in _FIELDS:
        have, want = getattr(cached, field), getattr(fresh, field)
        if have != want:
            yield _difference(cached.name, field, _text(have), _text(want))


def _bytes(name: str, cached: "torch.Tensor", fresh: "torch.Tensor") -> TensorDifference | None:
    """How two uint8[n] differ; None when they do not. The cached one may be on a GPU."""
    import torch

    if cached.numel() != fresh.numel():
        return _difference(name, "nbytes", str(cached.numel()), str(fresh.numel()))
    count, first, shown = 0, 0, ("", "")
    for start in range(0, cached.numel(), _CHUNK_BYTES):
        here = cached[start : start + _CHUNK_BYTES]
        there = fresh[start : start + _CHUNK_BYTES].to(here.device)
        if torch.equal(here, there):
            continue
        differs = (here != there).view(torch.uint8)
        if not count:
            at = int(differs.argmax())  # of equal values the first one
            at -= at % _SHOWN_BYTES
            first = start + at
            shown = (_hex(here[at : at + _SHOWN_BYTES]), _hex(there[at : at + _SHOWN_BYTES]))
        count += int(differs.sum(dtype=torch.int64))
    if not count:
        return None
    where = f"at byte {first}; {count} of {cached.numel()} differ"
    return _difference(name, "bytes", shown[0], f"{shown[1]} {where}")


def _hex(data: "torch.Tensor") -> str:
    return bytes(data.tolist()).hex()


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return str(list(value))
    return "none" if value is None else str(value)


def _difference(tensor: str, field: str, cached: str, fresh: str) -> TensorDifference:
    return TensorDifference(tensor=tensor, field=field, cached=cached, fresh=fresh)


def _why_not(rank: int, manifest: Manifest, config: Config | None, folder: Path | None) -> str:
    """Why there is no fresh load to compare with; empty when there can be one."""
    if not comes_from_disk(manifest):
        return (
            "an engine published these weights, and nothing on disk is known to be the same;"
            " the digests say that they are what it published, and an instance loaded with"
            " wcache up --model can be compared"
        )
    if config is None:
        return "a fresh load needs the configuration, which can not be read"
    if rank >= config.ranks.world_size:
        return "the rank is not part of the configuration, so there is no fresh load of it"
    # Other files, or other memory, are still the same tensors; all else makes others of them.
    others = [
        difference.field
        for difference in compare_fingerprints(manifest.fingerprint, wanted_by(config, rank))
        if difference.field not in ("content", "device", "device_uuid")
    ]
    if others:
        return f"the configuration asks for other weights ({', '.join(others)})"
    if folder is None:
        return "it is not known where the files lie that were loaded"
    return ""


def _result(
    rank: int, outcome: Outcome, detail: str, differences: tuple[TensorDifference, ...] = ()
) -> Result:
    return Result(rank=rank, check="parity", result=outcome, detail=detail, differences=differences)
