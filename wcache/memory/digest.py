"""The digest of a run of bytes, computed where they are: on the CPU or on the GPU."""

from array import array
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from wcache.memory.mixing import Span

ALGORITHM = "mix64"
"""The bytes are 64-bit little-endian words, the last one filled up with zeros. Word w at position p
is mixed, as unsigned 64-bit arithmetic::

    x = w + p * STEP;  x ^= x >> 32;  x *= FIRST;  x ^= x >> 29;  x *= SECOND;  x ^= x >> 32

The sum of all of them, plus the number of bytes times LENGTH, is mixed once more from the first
shift on, and is the digest. Mixing maps words one to one, so a change within a single word is
always seen; any other is missed with a chance of 2**-64. Words moved, also whole chunks of them,
meet other positions, zeros have values of their own, and the two multiplications with a shift
between them keep changes of several words (sign bits, say) from cancelling out, which they do in a
plain sum of products. It guards against accidents: whoever can choose the bytes can make a
collision.

On a GPU one kernel reads the bytes once (:mod:`wcache.memory.mix_kernel`); where it can not be
compiled, and on the CPU, torch's own operations do the same (:mod:`wcache.memory.mixing`).
"""

# The first multiplier of Stafford's variant 1 of MurmurHash3's finalizer.
_LENGTH = 0x7FB5D329728EA185
_MASK = (1 << 64) - 1


def digest(data: "torch.Tensor", *, chunk_bytes: int | None = None) -> str:
    """``mix64:`` and 16 hexadecimal digits over ``data``, a contiguous uint8[n] on any device.

    Neither the device nor ``chunk_bytes`` changes the result. ``chunk_bytes``, how much is worked
    on at a time, has torch's operations do the work.
    """
    return digests(data, [(0, data.numel())], chunk_bytes=chunk_bytes)[0]


def digests(
    content: "torch.Tensor", spans: "Sequence[Span]", *, chunk_bytes: int | None = None
) -> list[str]:
    """The :func:`digest` of each of ``spans`` of ``content``, a contiguous uint8[n].

    A span is (offset, length) in bytes; it may begin and end anywhere, and share bytes with others.
    Raises :class:`ValueError` for one that reaches out of the content. On the CPU up to twelve
    threads share the work. A GPU is waited for once, at the end.
    """
    import torch

    from wcache.memory import mixing

    _check(content)
    if not spans:
        return []
    # A tensor for each of 20,000 spans would take longer than a GPU takes for their bytes.
    table = torch.frombuffer(array("q", chain.from_iterable(spans)), dtype=torch.int64)
    offsets, sizes = table.view(-1, 2).unbind(1)
    if int(offsets.min()) < 0 or int(sizes.min()) < 0:
        raise ValueError("a span begins before the content, or ends before it begins")
    if bool((sizes > content.numel() - offsets).any()):
        raise ValueError(f"a span reaches out of the content, which has {content.numel()} bytes")
    totals = None
    if content.is_cuda and chunk_bytes is None:
        from wcache.memory import mix_kernel

        totals = mix_kernel.sums(content, offsets, sizes)
    if totals is None:
        totals = mixing.sums(content, spans, chunk_bytes=chunk_bytes)
    totals += sizes * mixing.signed(_LENGTH)
    mixing.mix(totals, torch.empty_like(totals))
    return [f"{ALGORITHM}:{value & _MASK:016x}" for value in totals.tolist()]


class Parts:
    """Sums over parts of runs in host memory; for one thread, which so keeps its buffers."""

    def __init__(self) -> None:
        import torch

        from wcache.memory.mixing import Workspace

        self._workspace = Workspace(torch.device("cpu"))

    def sum(self, data: "torch.Tensor", offset: int = 0) -> int:
        """What ``data``, a contiguous uint8[n], adds to the digest of a run that has it at
        ``offset``.

        ``offset`` is in bytes and a multiple of 8, and so is n, except at the end of the run. The
        parts of a run may be taken in any order and in any threads: the total of their sums is
        what :func:`finish` takes.
        """
        from wcache.memory.mixing import WORD_BYTES

        _check(data)
        if offset < 0 or offset % WORD_BYTES:
            raise ValueError(f"part at byte {offset} of a run does not begin with a word")
        return int(self._workspace.total(data, offset // WORD_BYTES))


def finish(total: int, nbytes: int) -> str:
    """The digest of a run of ``nbytes`` whose :class:`Parts` have the sum ``total``."""
    from wcache.memory.mixing import FIRST, SECOND, SHIFTS

    value = (total + nbytes * _LENGTH) & _MASK
    for shift, factor in zip(SHIFTS, (FIRST, SECOND, 1), strict=True):
        value = (value ^ value >> shift) * factor & _MASK
    return f"{ALGORITHM}:{value:016x}"


def _check(data: "torch.Tensor") -> None:
    import torch

    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise ValueError(f"expected contiguous uint8[n], got {data.dtype} {tuple(data.shape)}")
