"""Buffers between a file and the memory that its bytes are for, and what is done on the way."""

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from wcache.fp8 import BLOCK
from wcache.load.plan import Scale
from wcache.load.quantize import quantize_into
from wcache.load.reading.files import hull_bytes
from wcache.load.reading.pieces import Piece
from wcache.memory import driver
from wcache.memory.dtypes import TORCH_DTYPES


class Queue(Protocol):
    """Where the work on a buffer is queued, so that it is known when the buffer is free again."""

    def entered(self) -> AbstractContextManager[None]:
        """Work of the block is queued behind what is queued already."""

    def wait(self) -> None:
        """Waits for all of it."""

    def copy_rows(self, to: torch.Tensor, rows: torch.Tensor) -> None:
        """Copies uint8[n, width]; ``rows`` may lie apart from each other, those of ``to`` not."""


class Inline:
    """Stands for a queue on the CPU, where work is done when it is asked for."""

    def entered(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def wait(self) -> None:
        pass

    def copy_rows(self, to: torch.Tensor, rows: torch.Tensor) -> None:
        to.copy_(rows)


class Stream:
    """A CUDA stream of its own, and an event behind what was queued last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        # A thread that waits sleeps: the cores are for those that read.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                # Also behind what was queued before something failed: it uses the buffer too.
                self._event.record(self._stream)

    def wait(self) -> None:
        self._event.synchronize()

    def copy_rows(self, to: torch.Tensor, rows: torch.Tensor) -> None:
        if rows.is_contiguous():
            to.copy_(rows, non_blocking=True)
            return
        # torch would put rows together on the CPU first; the copy engine takes them as they lie.
        driver.copy_rows(
            self._device.index, stream=self._stream.cuda_stream, to=to.data_ptr(),
            source=rows.data_ptr(), pitch=rows.stride(0), width=rows.shape[1], rows=rows.shape[0],
        )  # fmt: skip


class Slot:
    """One buffer of host memory; pinned where a GPU copies from it.

    The thread that makes it should be the one that fills it: its pages come from the NUMA node of
    whoever touches them first. For a GPU it has chosen that one as its device.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Has room for a direct read of ``nbytes``, and begins on a page as that needs it."""
        self.nbytes = nbytes
        room = hull_bytes(nbytes)
        self.queue: Queue
        if device.type == "cuda":
            self.buffer = torch.empty(room, dtype=torch.uint8, pin_memory=True)
            self.queue = Stream(device)
        else:
            # Tensor and view keep the map, which is gone with the last of them.
            self.buffer = torch.frombuffer(mmap.mmap(-1, room), dtype=torch.uint8)
            self.queue = Inline()
        array = (ctypes.c_ubyte * room).from_address(self.buffer.data_ptr())
        self.view = memoryview(array).cast("B")
        """The bytes of :attr:`buffer`, for as long as that is there."""


def keep(slot: Slot, skip: int, piece: Piece, content: torch.Tensor) -> None:
    """Queues what brings ``piece``, which is in ``slot`` from byte ``skip`` on, to its place.

    ``content``, uint8[n], is the rank's memory. Rows are cut, and values converted or quantized,
    on the device that the memory is on.
    """
    target = piece.target
    rows = slot.buffer[skip : skip + piece.read_bytes].view(piece.rows, piece.row_bytes)
    rows = rows[:, piece.skip : piece.skip + piece.width]
    kept = content[piece.place : piece.place + piece.nbytes]
    with slot.queue.entered():
        if piece.is_plain:
            slot.queue.copy_rows(kept.view(piece.rows, piece.width), rows)
            return
        if content.is_cuda or skip % TORCH_DTYPES[target.source.dtype].itemsize:
            # To the device first, as bytes, where they lie as values of their dtype have to.
            compact = torch.empty(rows.shape, dtype=torch.uint8, device=content.device)
            slot.queue.copy_rows(compact, rows)
            rows = compact
        values = rows.view(TORCH_DTYPES[target.source.dtype])
        converted = kept.view(TORCH_DTYPES[target.dtype]).view(values.shape)
        if target.scale is None:
            converted.copy_(values)
        else:
            _quantize(values, converted, piece, target.scale, content)


def scale_rows(piece: Piece) -> tuple[int, int]:
    """Which rows of its target's scale a piece fills, as (first, count)."""
    first = piece.before // piece.width
    return first // BLOCK, -(-piece.rows // BLOCK)


def _quantize(
    values: torch.Tensor, weight: torch.Tensor, piece: Piece, scale: Scale, content: torch.Tensor
) -> None:
    whole = content[scale.offset : scale.offset + scale.nbytes].view(torch.float32)
    first, count = scale_rows(piece)
    quantize_into(values, weight, whole.view(scale.shape)[first : first + count])
