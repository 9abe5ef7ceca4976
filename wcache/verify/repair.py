"""Repair: what is damaged is read from disk again, into a generation that replaces the old one."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from wcache.checkpoint import diff, identify
from wcache.errors import MismatchError, OutOfMemoryError, TryAgainError, WcacheError
from wcache.load.order import PUBLISH_S
from wcache.load.publish import hand_over, rank_memory
from wcache.load.report import failure_told
from wcache.manifest import Manifest, Storage
from wcache.memory.slab import Access, Memory, Slab
from wcache.paths import RankPaths
from wcache.protocol.control import Control
from wcache.protocol.messages import AskLoad, AskReport, LoadOrder, Report
from wcache.ranks import RankView, holders
from wcache.units import size
from wcache.verify.digests import digests_result, names
from wcache.verify.fresh import Fresh, comes_from_disk
from wcache.verify.held import Held, gpu_room
from wcache.verify.result import Progress, Result, some

if TYPE_CHECKING:
    import torch


def repair(
    paths: RankPaths,
    one: Held,
    manifest: Manifest,
    content: "torch.Tensor",
    bad: list[int],
    folder: Path | None,
    progress: Progress,
) -> Iterator[Result]:
    """Mends the storages ``bad`` of what is served, and says what was done."""
    rank = paths.id.rank
    if not bad:
        yield digests_result(rank, manifest, bad)
        yield Result(rank=rank, check="repair", result="ok", detail="nothing is damaged")
        return
    try:
        done, holding = _Repair(paths, one, manifest, content, bad).run(folder, progress)
    except WcacheError as error:
        yield digests_result(rank, manifest, bad)
        hint = f" ({error.hint})" if error.hint else ""
        yield Result(rank=rank, check="repair", result="bad", detail=error.message + hint)
        return
    yield digests_result(rank, manifest, bad, outcome="warning")
    yield Result(rank=rank, check="repair", result="ok", detail=done)
    for line in holding:
        detail = f"holds the damaged bytes until it restarts: {line}"
        yield Result(rank=rank, check="repair", result="warning", detail=detail)


class _Repair:
    def __init__(
        self,
        paths: RankPaths,
        one: Held,
        manifest: Manifest,
        content: "torch.Tensor",
        bad: list[int],
    ) -> None:
        self._paths = paths
        self._held = one
        self._manifest = manifest
        self._content = content
        self._bad = bad
        self._ends = list(accumulate(slab.nbytes for slab in manifest.slabs))
        self._rebuilt = sorted({slab for number in bad for slab in self._slabs_of(number)})
        """Indices of the slabs with damage. All others are handed on as they are: a rank that
        fills its GPU could not be repaired if all of it were copied."""

    def run(self, folder: Path | None, progress: Progress) -> tuple[str, list[str]]:
        """What was done, and a line for each engine that has the damaged bytes mapped.

        Raises :class:`WcacheError`; what is served stays what it was then.
        """
        if not comes_from_disk(self._manifest):
            raise WcacheError(
                "an engine published these weights, so they can not be read again",
                hint="restart the engine that publishes, after wcache down",
            )
        if folder is None:
            raise WcacheError("it is not known where the files lie that were loaded")
        with Control.connect(self._paths, "loader") as control:
            order = control.request(AskLoad(repair=True), LoadOrder)
            control.channel.settimeout(PUBLISH_S)
            with failure_told(control):
                report = control.request(AskReport(), Report)
                self._check_serves(report)
                fresh = Fresh.of(folder, order.config, self._paths.id.rank)
                self._check_files(fresh)
                wanted = self._read_again(fresh)
                memory = rank_memory(order.config, self._paths.id.rank)
                number = self._publish(control, memory, fresh, wanted, progress)
        read = sum(self._manifest.storages[storage].nbytes for storage in self._bad)
        done = (
            f"generation {number} is served, with {some(list(wanted))} read again: {size(read)}"
            f" of {size(self._manifest.weight_bytes)}"
        )
        return done, self._holding(report)

    def _check_serves(self, report: Report) -> None:
        serving = report.serving
        if serving is None or serving.manifest_digest != self._held.attached.manifest_digest:
            raise TryAgainError("another generation is served since", hint="verify that one")

    def _check_files(self, fresh: Fresh) -> None:
        found = identify(fresh.checkpoint)
        recorded = self._manifest.fingerprint.content
        changed = diff(self._manifest.checkpoint, found.shards)
        if changed or recorded not in (None, found.digest):
            raise WcacheError(
                f"{fresh.checkpoint.path} is not what was loaded any more: "
                + (some(changed) if changed else "config.json"),
                hint="wcache up --model … loads what is there now",
            )

    def _read_again(self, fresh: Fresh) -> dict[str, int]:
        """The storage of each tensor that has to be read, by its name in a fresh load."""
        expected = {name for name, tensor in fresh.tensors().items() if tensor.tied_to is None}
        wanted: dict[str, int] = {}
        for number in self._bad:
            found = [name for name in names(self._manifest, number) if name in expected]
            if len(found) != 1:
                raise WcacheError(
                    f"storage {number} ({some(names(self._manifest, number))}) is not one tensor"
                    " of a fresh load",
                    hint="wcache up --model … loads all of it anew",
                )
            wanted[found[0]] = number
        return wanted

    def _publish(
        self,
        control: Control,
        memory: Memory,
        fresh: Fresh,
        wanted: dict[str, int],
        progress: Progress,
    ) -> int:
        self._check_room(memory)
        slabs = [
            Slab(fd, info)
            for fd, info in zip(self._held.slab_fds, self._manifest.slabs, strict=True)
        ]
        with contextlib.ExitStack() as stack:
            for index in self._rebuilt:
                slabs[index] = memory.create(slabs[index].nbytes)
                stack.callback(slabs[index].close)
            self._fill(memory, [slabs[index] for index in self._rebuilt], fresh, wanted, progress)
            self._check(memory, slabs)
            for index in self._rebuilt:
                memory.seal(slabs[index])
            manifest = msgspec.structs.replace(self._manifest, id=secrets.token_hex(16))
            return hand_over(control, slabs, manifest)

    def _check_room(self, memory: Memory) -> None:
        needed = sum(self._manifest.slabs[index].nbytes for index in self._rebuilt)
        free = memory.free_bytes()
        if needed > free:
            raise OutOfMemoryError(
                f"the slabs with damage are made anew beside the old: {size(needed)} of memory,"
                f" {size(free)} is free",
                hint="free memory, or wcache down and wcache up",
            )

    def _fill(
        self,
        memory: Memory,
        made: list[Slab],
        fresh: Fresh,
        wanted: dict[str, int],
        progress: Progress,
    ) -> None:
        """Copies the old slabs, and then puts what is read from disk in its places."""
        mapping = memory.map(made, Access.WRITE)
        total = sum(self._manifest.storages[number].nbytes for number in wanted.values())
        try:
            with gpu_room():
                new = mapping.tensor()
                begins = dict(zip(self._rebuilt, self._begins(made), strict=True))
                for index, place in begins.items():
                    nbytes = self._manifest.slabs[index].nbytes
                    start = self._ends[index] - nbytes
                    new[place : place + nbytes].copy_(self._content[start : start + nbytes])
                progress("read", 0, total)
                for name, data in fresh.read(
                    wanted.keys(), lambda done: progress("read", min(done, total), total)
                ):
                    storage = self._manifest.storages[wanted[name]]
                    if data.numel() != storage.nbytes:
                        raise MismatchError(
                            f"{name} has {data.numel()} bytes on disk and {storage.nbytes} in"
                            " memory"
                        )
                    self._put(new, begins, storage, data)
        finally:
            mapping.close()

    @staticmethod
    def _begins(made: list[Slab]) -> list[int]:
        return [0, *accumulate(slab.nbytes for slab in made[:-1])]

    def _put(
        self, new: "torch.Tensor", begins: dict[int, int], storage: Storage, data: "torch.Tensor"
    ) -> None:
        """Writes a storage into the new slabs, which lie apart where it crosses from one to
        another with no damage in between."""
        for index, place in begins.items():
            end = self._ends[index]
            start = end - self._manifest.slabs[index].nbytes
            first = max(start, storage.offset)
            last = min(end, storage.offset + storage.nbytes)
            if first < last:
                there = new[place + first - start : place + last - start]
                there.copy_(data[first - storage.offset : last - storage.offset])

    def _check(self, memory: Memory, slabs: list[Slab]) -> None:
        """Raises :class:`MismatchError` unless what is in the new slabs has its digests."""
        from wcache.memory.digest import digests

        touched = [
            number
            for number in range(len(self._manifest.storages))
            if set(self._slabs_of(number)) & set(self._rebuilt)
        ]
        mapping = memory.map(slabs, Access.READ)
        try:
            content = mapping.tensor()
            storages = [self._manifest.storages[number] for number in touched]
            with gpu_room():
                found = digests(content, [(one.offset, one.nbytes) for one in storages])
        finally:
            mapping.close()
        for number, storage, digest in zip(touched, storages, found, strict=True):
            if storage.digest != digest:
                raise MismatchError(
                    f"storage {number} ({some(names(self._manifest, number))}) has not its digest"
                    " after it was read again, so it is not published",
                    hint="the disk or the memory is at fault: see dmesg",
                )

    def _slabs_of(self, number: int) -> list[int]:
        """Indices of the slabs in which a storage lies."""
        storage = self._manifest.storages[number]
        starts = [0, *self._ends[:-1]]
        return [
            index
            for index, (start, end) in enumerate(zip(starts, self._ends, strict=True))
            if storage.offset < end and storage.offset + storage.nbytes > start
        ]

    def _holding(self, report: Report) -> list[str]:
        """Who has the old generation mapped, beside this process."""
        old = self._held.attached.generation
        leases = tuple(
            lease for lease in report.leases if lease.generation == old and lease.pid != os.getpid()
        )
        told = msgspec.structs.replace(report, leases=leases)
        return holders([RankView(rank=report.rank, report=told)])
