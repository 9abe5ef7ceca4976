"""The reads that fill one target: runs and rows of a file, in bounded pieces. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from wcache.load.plan import Target
from wcache.manifest import DTYPE_BYTES

CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """``rows`` rows of ``row_bytes`` from ``start`` of the file; of each row, ``width`` bytes from
    ``skip`` are wanted. Pieces of a target follow each other in the order of its elements."""

    start: int
    rows: int
    row_bytes: int
    skip: int
    width: int

    @property
    def read_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def kept_bytes(self) -> int:
        return self.rows * self.width

    @property
    def is_run(self) -> bool:
        """True when everything that is read is wanted."""
        return self.row_bytes == self.width


def pieces(target: Target, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Piece]:
    """The reads for ``target``, each of ``chunk_bytes`` at most; none for an empty tensor.

    A slice of the first dimension is one run of bytes. One of a later dimension is a column: whole
    rows are read and cut, since one read of megabytes is far cheaper than thousands of kilobytes;
    a row that is itself larger than a chunk is read in runs.
    """
    source, part = target.source, target.slice
    if not source.nbytes or (part is not None and part.start == part.stop):
        return
    if part is None:
        yield from _run(source.start, source.nbytes, chunk_bytes)
        return
    shape = source.shape
    inner = prod(shape[part.dim + 1 :]) * DTYPE_BYTES[source.dtype]
    rows, row_bytes = prod(shape[: part.dim]), shape[part.dim] * inner
    skip, width = part.start * inner, (part.stop - part.start) * inner
    if width == row_bytes:
        yield from _run(source.start, rows * row_bytes, chunk_bytes)
    elif rows == 1 or row_bytes > chunk_bytes:
        for row in range(rows):
            yield from _run(source.start + row * row_bytes + skip, width, chunk_bytes)
    else:
        step = chunk_bytes // row_bytes
        for row in range(0, rows, step):
            count = min(step, rows - row)
            yield Piece(source.start + row * row_bytes, count, row_bytes, skip, width)


def _run(start: int, nbytes: int, chunk_bytes: int) -> Iterator[Piece]:
    for done in range(0, nbytes, chunk_bytes):
        count = min(chunk_bytes, nbytes - done)
        yield Piece(start + done, 1, count, 0, count)
