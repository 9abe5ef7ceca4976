"""Reads the weights of a plan from the checkpoint's files into a rank's memory, in parallel."""

import contextlib
import os
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import attrgetter

import torch

from wcache.checkpoint import Checkpoint
from wcache.checkpoint.identity import open_unchanged
from wcache.load.plan import Plan
from wcache.load.reading import numa
from wcache.load.reading.files import SourceFile, hull_bytes
from wcache.load.reading.pieces import CHUNK_BYTES, Piece, begin_with_words, pieces
from wcache.load.reading.staging import Slot, keep, scale_rows
from wcache.load.reading.workers import work, worker_count
from wcache.manifest import DTYPE_BYTES
from wcache.memory import driver
from wcache.memory.digest import Parts, finish
from wcache.memory.host import HostMapping
from wcache.memory.slab import Mapping

Span = tuple[int, int]
"""Offset and bytes of a storage, as :attr:`Plan.spans` has it."""

# Of each reader for a GPU: one is filled while the other drains.
_SLOTS = 2


def read_plan(
    checkpoint: Checkpoint,
    plan: Plan,
    mapping: Mapping,
    progress: Callable[[int], None],
    *,
    chunk_bytes: int | None = None,
    workers: int | None = None,
    shared: bool = False,
    digested: bool = True,
) -> dict[Span, str]:
    """Fills ``mapping`` with the weights of ``plan``.

    Returns the digests of the storages that were digested on the way: on the host and unless
    ``digested`` is False all, but for weights that are quantized and tensors whose pieces are no
    whole words. ``progress`` is called, in this thread, with the bytes written so far. Files that
    are not in the page cache are read past it, unless other ranks read the same: ``shared`` says
    that they read all of it. Beside the mapping, two chunks of memory are used by each worker at
    most, and for what is converted two more on the device; a chunk is about :data:`CHUNK_BYTES`
    unless ``chunk_bytes`` says otherwise.

    Raises :class:`CheckpointError` when a file can not be read or is not what its header said any
    more. No thread is left then, and nothing refers to the mapping.
    """
    on_host = isinstance(mapping, HostMapping)
    if chunk_bytes is None:
        # torch rounds pinned memory up to a power of two, which a chunk and its hull are together.
        chunk_bytes = CHUNK_BYTES if on_host else CHUNK_BYTES - hull_bytes(0)
    largest = max(DTYPE_BYTES.values())
    if chunk_bytes < largest or chunk_bytes % largest:
        raise ValueError(f"chunks of {chunk_bytes} bytes would cut elements")
    files = _Files(checkpoint, plan, chunk_bytes, shared=shared, digested=digested and on_host)
    lanes: list[_Lane] = []

    @contextlib.contextmanager
    def worker() -> Iterator[Callable[[tuple[SourceFile, Piece]], int]]:
        lane = _Lane(mapping, files)
        lanes.append(lane)
        try:
            yield lane.read
        finally:
            lane.close()

    try:
        with _single_threaded_torch():
            work(files.pieces(), worker, workers or worker_count(on_host=on_host), progress)
        files.check_unchanged()
    finally:
        files.close()
    sums = dict.fromkeys(files.in_words, 0)
    for lane in lanes:
        for span, total in lane.sums.items():
            sums[span] += total
    return {span: finish(total, span[1]) for span, total in sums.items()}


class _Files:
    """What is to be read, file by file, in the order of their bytes."""

    def __init__(
        self, checkpoint: Checkpoint, plan: Plan, chunk_bytes: int, *, shared: bool, digested: bool
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self.in_words: set[Span] = set()
        """Storages that can be digested piece by piece."""
        self._checkpoint = checkpoint
        # The order of the plan is that of the bytes on disk, but a tied tensor may stand apart.
        self._targets = sorted(plan.stored, key=attrgetter("source.file", "source.start"))
        self._shared, self._digested = shared, digested
        # Where this rank has slices of some tensors, other ranks want the rest of them, and all of
        # the others.
        self._is_sharded = any(target.slice is not None for target in self._targets)
        self._open: list[SourceFile] = []

    def pieces(self) -> Iterator[tuple[SourceFile, Piece]]:
        files = {file.name: file for file in self._checkpoint.files}
        for name, targets in groupby(self._targets, key=attrgetter("source.file")):
            found: list[Piece] = []
            for target in targets:
                parts = list(pieces(target, self.chunk_bytes))
                if self._digested and target.scale is None and begin_with_words(parts):
                    self.in_words.add((target.offset, target.nbytes))
                found += parts
            file = SourceFile(self._checkpoint, files[name], len(found))
            self._open = [one for one in self._open if not one.is_done] + [file]
            yield from ((file, piece) for piece in found)

    def is_mine(self, piece: Piece) -> bool:
        """True when no other rank reads these bytes: else the page cache spares it the disk."""
        if self._shared or not piece.is_run:
            return False
        return piece.target.slice is not None or not self._is_sharded

    def check_unchanged(self) -> None:
        """Raises :class:`CheckpointError` for a file that is not the one whose header was read.

        After everything: what was written to while it was read shows now, wherever that was.
        """
        wanted = {target.source.file for target in self._targets}
        for file in self._checkpoint.files:
            if file.name in wanted:
                os.close(open_unchanged(self._checkpoint, file))

    def close(self) -> None:
        for file in self._open:
            file.close()


class _Lane:
    """One worker's way from files to memory."""

    def __init__(self, mapping: Mapping, files: _Files) -> None:
        self._content = mapping.tensor()
        # Host memory can be read into without a detour.
        self._host = mapping if isinstance(mapping, HostMapping) else None
        self._view = self._host.buffer() if self._host is not None else None
        self._files = files
        self._slots: list[Slot] = []
        self._parts = Parts()
        self.sums: dict[Span, int] = {}
        """By storage, what its pieces add to its digest."""
        if self._content.is_cuda:
            # This thread's: torch goes back to it whenever it leaves a stream, which would make a
            # context on the first GPU where no other was chosen, 0.6 GiB for each loader.
            torch.cuda.set_device(self._content.device)
            numa.bind_near(driver.pci_address(self._content.device.index))

    def read(self, task: tuple[SourceFile, Piece]) -> int:
        """Brings one piece to its place; returns the bytes that it became."""
        file, piece = task
        file.open()
        if self._host is not None:
            self._host.populate(piece.place, piece.nbytes)
        direct = self._files.is_mine(piece) and file.is_cold(piece.start, piece.read_bytes)
        if self._view is not None and piece.is_plain and piece.is_run and not direct:
            file.fill(self._view[piece.place : piece.place + piece.nbytes], piece.start)
        else:
            slot = self._slot(piece.read_bytes)
            skip = 0
            if direct:
                skip = file.fill_direct(slot.view, piece.start, piece.read_bytes)
            else:
                file.fill(slot.view[: piece.read_bytes], piece.start)
            keep(slot, skip, piece, self._content)
        file.piece_done()
        self._digest(piece)
        return piece.nbytes + _scale_bytes(piece)

    def close(self) -> None:
        """Waits for what is queued, and gives memory and buffers up."""
        try:
            for slot in self._slots:
                slot.queue.wait()
        finally:
            del self._content, self._view
            self._slots.clear()

    def _slot(self, nbytes: int) -> Slot:
        """The buffer that was filled longest ago, when it is free again."""
        room = max(nbytes, self._files.chunk_bytes)
        if len(self._slots) < (_SLOTS if self._host is None else 1):
            self._slots.append(Slot(room, self._content.device))
            return self._slots[-1]
        slot = self._slots.pop(0)
        slot.queue.wait()
        if slot.nbytes < nbytes:
            slot = Slot(room, self._content.device)
        self._slots.append(slot)
        return slot

    def _digest(self, piece: Piece) -> None:
        """While the piece is in this core's cache."""
        span = (piece.target.offset, piece.target.nbytes)
        if span not in self._files.in_words:
            return
        part = self._content[piece.place : piece.place + piece.nbytes]
        total = self._parts.sum(part, piece.place - piece.target.offset)
        self.sums[span] = self.sums.get(span, 0) + total


def _scale_bytes(piece: Piece) -> int:
    scale = piece.target.scale
    if scale is None:
        return 0
    return scale_rows(piece)[1] * scale.shape[1] * DTYPE_BYTES["F32"]


@contextlib.contextmanager
def _single_threaded_torch() -> Iterator[None]:
    """Operations stay in the thread that they are called in: all cores have one of ours already."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
