"""The digest of a run of bytes, computed where they are: on the CPU or on the GPU."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
    return digests([data], chunk_bytes=chunk_bytes)[0]


def digests(data: Iterable["torch.Tensor"], *, chunk_bytes: int | None = None) -> list[str]:
    """The :func:`digest` of each, for many runs at once.

    On the CPU up to eight threads share the work. A GPU is waited for once, at the end.
    """
    runs = [(tensor, 0) for tensor in data]
    totals = _sums(runs, chunk_bytes)
    return [finish(total, run.numel()) for total, (run, _) in zip(totals, runs, strict=True)]


def partial(data: "torch.Tensor", offset: int = 0) -> int:
    """What ``data``, a contiguous uint8[n], adds to the digest of a run that has it at ``offset``.

    ``offset`` is in bytes and a multiple of 8, and so is n, except at the end of the run. The parts
    of a run may be taken in any order and in any threads: their sum is what :func:`finish` takes.
    """
    from wcache.memory.mixing import WORD_BYTES

    if offset < 0 or offset % WORD_BYTES:
        raise ValueError(f"part at byte {offset} of a run does not begin with a word")
    (total,) = _sums([(data, offset // WORD_BYTES)], None)
    return total


def finish(total: int, nbytes: int) -> str:
    """The digest of a run of ``nbytes`` whose :func:`partial` parts have the sum ``total``."""
    from wcache.memory.mixing import FIRST, SECOND, SHIFTS

    value = (total + nbytes * _LENGTH) & _MASK
    for shift, factor in zip(SHIFTS, (FIRST, SECOND, 1), strict=True):
        value = (value ^ value >> shift) * factor & _MASK
    return f"{ALGORITHM}:{value:016x}"


def _sums(runs: "Sequence[tuple[torch.Tensor, int]]", chunk_bytes: int | None) -> list[int]:
    from wcache.memory import mixing

    for data, _ in runs:
        _check(data)
    devices = {data.device for data, _ in runs}
    if chunk_bytes is None and len(devices) == 1 and devices.pop().type == "cuda":
        from wcache.memory import mix_kernel

        found = mix_kernel.sums(runs)
        if found is not None:
            return found
    return mixing.sums(runs, chunk_bytes=chunk_bytes)


def _check(data: "torch.Tensor") -> None:
    import torch

    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise ValueError(f"expected contiguous uint8[n], got {data.dtype} {tuple(data.shape)}")
