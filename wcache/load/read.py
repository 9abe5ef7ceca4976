"""Streams the weights of a plan from the checkpoint's files into a rank's memory."""

import ctypes
import os
from collections.abc import Callable
from itertools import groupby
from math import prod
from operator import attrgetter
from pathlib import Path

import torch

from wcache.checkpoint import Checkpoint
from wcache.checkpoint.document import HINT_DOWNLOAD, unreadable
from wcache.checkpoint.identity import check_unchanged, open_unchanged
from wcache.errors import CheckpointError
from wcache.load.pieces import CHUNK_BYTES, Piece, pieces
from wcache.load.plan import Plan, Scale, Target
from wcache.load.quantize import quantize_into
from wcache.manifest import DTYPE_BYTES
from wcache.memory.dtypes import TORCH_DTYPES
from wcache.memory.host import HostMapping
from wcache.memory.slab import Mapping

# A piece must end between two elements, whatever their dtype.
_LARGEST_ELEMENT = 8


def read_plan(
    checkpoint: Checkpoint,
    plan: Plan,
    mapping: Mapping,
    progress: Callable[[int], None],
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Fills ``mapping`` with the weights of ``plan``.

    ``progress`` is called with the bytes written so far. Beside the mapping, one chunk of memory is
    used at most. Raises :class:`CheckpointError` when a file is not what its header said any more.
    """
    reader = _Reader(mapping, progress, chunk_bytes)
    files = {file.name: file for file in checkpoint.files}
    # The order of the plan is that of the bytes on disk, but a tied tensor may stand apart.
    order = sorted(plan.stored, key=attrgetter("source.file", "source.start"))
    for name, targets in groupby(order, key=attrgetter("source.file")):
        fd = open_unchanged(checkpoint, files[name])
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            for target in targets:
                reader.read(fd, checkpoint.path / name, target)
            check_unchanged(checkpoint, files[name], fd)
        finally:
            os.close(fd)


class _Reader:
    def __init__(self, mapping: Mapping, progress: Callable[[int], None], chunk_bytes: int) -> None:
        if chunk_bytes < _LARGEST_ELEMENT or chunk_bytes % _LARGEST_ELEMENT:
            raise ValueError(f"chunks of {chunk_bytes} bytes would cut elements")
        self._range = mapping.tensor()
        # Host memory can be read into without a detour.
        self._direct = mapping.buffer() if isinstance(mapping, HostMapping) else None
        self._progress = progress
        self._chunk_bytes = chunk_bytes
        self._done = 0
        self._staging: torch.Tensor | None = None

    def read(self, fd: int, path: Path, target: Target) -> None:
        if target.scale is not None:
            self._quantize(fd, path, target, target.scale)
            return
        converted = target.dtype != target.source.dtype
        place = target.offset
        for piece in pieces(target, self._chunk_bytes):
            if self._direct is not None and piece.is_run and not converted:
                end = place + piece.kept_bytes
                _fill(fd, self._direct[place:end], piece.start, path)
            else:
                staging = self._stage(piece.read_bytes)
                _fill(fd, _view(staging), piece.start, path)
                end = self._keep(staging, piece, target, place)
            self._done += end - place
            place = end
            self._progress(self._done)

    def _quantize(self, fd: int, path: Path, target: Target, scale: Scale) -> None:
        """Reads this rank's slice to where it will be kept, whole, and quantizes it there."""
        nbytes = prod(target.shape) * DTYPE_BYTES[target.source.dtype]
        source = torch.empty(nbytes, dtype=torch.uint8, device=self._range.device)
        place = 0
        for piece in pieces(target, self._chunk_bytes):
            staging = self._stage(piece.read_bytes)
            _fill(fd, _view(staging), piece.start, path)
            rows = staging.view(piece.rows, piece.row_bytes)
            end = place + piece.kept_bytes
            kept = source[place:end].view(piece.rows, piece.width)
            kept.copy_(rows[:, piece.skip : piece.skip + piece.width])
            place = end
        quantize_into(
            source.view(TORCH_DTYPES[target.source.dtype]).view(target.shape),
            self._range[target.offset : target.offset + target.nbytes]
            .view(TORCH_DTYPES[target.dtype])
            .view(target.shape),
            self._range[scale.offset : scale.offset + scale.nbytes]
            .view(torch.float32)
            .view(scale.shape),
        )
        self._done += target.nbytes + scale.nbytes
        self._progress(self._done)

    def _stage(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] of the one staging buffer; pinned where a GPU is to copy from it."""
        if self._staging is None:
            pinned = self._range.is_cuda
            self._staging = torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._staging[:nbytes]

    def _keep(self, staging: torch.Tensor, piece: Piece, target: Target, place: int) -> int:
        """Cuts and converts what was staged into its place; returns where that ends."""
        wanted = staging.view(piece.rows, piece.row_bytes)
        wanted = wanted[:, piece.skip : piece.skip + piece.width]
        if target.dtype == target.source.dtype:
            end = place + piece.kept_bytes
            self._range[place:end].view(piece.rows, piece.width).copy_(wanted)
            return end
        elements = wanted.view(TORCH_DTYPES[target.source.dtype])
        end = place + elements.numel() * DTYPE_BYTES[target.dtype]
        kept = self._range[place:end].view(TORCH_DTYPES[target.dtype])
        kept.view(elements.shape).copy_(elements)
        return end


def _view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which must outlive the view."""
    array = (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def _fill(fd: int, view: memoryview, start: int, path: Path) -> None:
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], start + done)
        except OSError as error:
            raise unreadable(path, error) from None
        if not count:
            raise CheckpointError(f"{path} shrank while it was read", hint=HINT_DOWNLOAD)
        done += count
