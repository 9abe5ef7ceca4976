"""The reads that fill a target: runs and rows of a file, in bounded pieces. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from wcache.fp8 import BLOCK
from wcache.load.plan import Target
from wcache.manifest import DTYPE_BYTES

CHUNK_BYTES = 16 << 20
"""What is read, or copied to a GPU, at a time. Out of a cold page cache four threads got 1.56 GB/s
so, and 0.66 with 4 MiB and three times the CPU (measured): what the kernel reads ahead for one of
them is not what the next one asks for. Out of a warm one the size makes no difference."""

_WORD_BYTES = 8
# Of rows of which a part is wanted, either everything is read and the part copied out, or every
# row's part is read by a call of its own, which costs about a microsecond of Python however little
# it brings. Measured on 2 cores, page cache, two threads, GB/s of wanted bytes:
#
#     row KiB, wanted KiB     2, 1   8, 4   8, 1   28, 14   28, 3.5   56, 28   56, 7   112, 56
#     whole rows               7.8    6.3    2.2      7.2       2.6      7.4     2.3       7.6
#     a read for every row     0.8    2.3    0.9      5.5       2.3      8.4     4.3      10.8
#
# Between its calls the second way holds Python's lock, which all threads share, so with more of
# them the first gains more: it is left only where whole rows would drown what is wanted.
_GAP_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Piece:
    """``rows`` rows of ``row_bytes`` from ``start`` of the file; of each row, ``width`` bytes from
    ``skip`` are wanted. Pieces of a target follow each other in the order of its elements."""

    target: Target
    start: int
    rows: int
    row_bytes: int
    skip: int
    width: int
    before: int
    """Bytes of the target, as the file has them, that pieces before this one bring."""

    @property
    def read_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of it that are wanted, as the file has them."""
        return self.rows * self.width

    @property
    def is_run(self) -> bool:
        """True when everything that is read is wanted."""
        return self.row_bytes == self.width

    @property
    def place(self) -> int:
        """Byte offset, in the rank's slabs laid back to back, of what it becomes."""
        return self.target.offset + self._converted(self.before)

    @property
    def nbytes(self) -> int:
        """Bytes of what it becomes."""
        return self._converted(self.kept_bytes)

    @property
    def is_plain(self) -> bool:
        """True when bytes are kept as they are in the file."""
        return self.target.dtype == self.target.source.dtype

    def _converted(self, nbytes: int) -> int:
        source = DTYPE_BYTES[self.target.source.dtype]
        return nbytes // source * DTYPE_BYTES[self.target.dtype]


def pieces(target: Target, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Piece]:
    """The reads for ``target``, each of ``chunk_bytes`` at most; none for an empty tensor.

    A slice of the first dimension is one run of bytes. One of a later dimension is a column: rows
    are read whole and cut, or each for itself, as the comment above measured. A target that is
    quantized comes in whole rows of blocks, which may then be more than ``chunk_bytes``.
    """
    source, part = target.source, target.slice
    if not source.nbytes or (part is not None and part.start == part.stop):
        return
    item = DTYPE_BYTES[source.dtype]
    # As rows of which a part is wanted; without a slice, and along the first dimension, one row.
    dim = 0 if part is None else part.dim
    inner = prod(source.shape[dim + 1 :]) * item
    rows, row_bytes = prod(source.shape[:dim]), source.nbytes // prod(source.shape[:dim])
    skip, width = (0, row_bytes) if part is None else (
        part.start * inner, (part.stop - part.start) * inner
    )  # fmt: skip
    if target.scale is not None:
        if dim == 0:
            start, rows, row_bytes = source.start + skip, target.shape[0], inner
            skip, width = 0, inner
        else:
            start = source.start
        step = max(chunk_bytes // row_bytes // BLOCK, 1) * BLOCK
        yield from _stripes(target, start, rows, row_bytes, skip, width, step)
    elif width == row_bytes:
        yield from _run(target, source.start, rows * row_bytes, 0, chunk_bytes)
    elif rows == 1 or row_bytes > chunk_bytes or row_bytes - width > _GAP_BYTES:
        for row in range(rows):
            start = source.start + row * row_bytes + skip
            yield from _run(target, start, width, row * width, chunk_bytes)
    else:
        step = chunk_bytes // row_bytes
        # A whole number of words, whatever the width, so that each can be digested by itself.
        step = step // _WORD_BYTES * _WORD_BYTES or step
        yield from _stripes(target, source.start, rows, row_bytes, skip, width, step)


def begin_with_words(found: Sequence[Piece]) -> bool:
    """True when every piece of a target is kept from a multiple of 8 bytes of it on."""
    return all((piece.place - piece.target.offset) % _WORD_BYTES == 0 for piece in found)


def _stripes(
    target: Target, start: int, rows: int, row_bytes: int, skip: int, width: int, step: int
) -> Iterator[Piece]:
    for row in range(0, rows, step):
        count = min(step, rows - row)
        yield Piece(target, start + row * row_bytes, count, row_bytes, skip, width, row * width)


def _run(target: Target, start: int, nbytes: int, before: int, chunk_bytes: int) -> Iterator[Piece]:
    for done in range(0, nbytes, chunk_bytes):
        count = min(chunk_bytes, nbytes - done)
        yield Piece(target, start + done, 1, count, 0, count, before + done)
