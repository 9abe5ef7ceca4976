"""The digest of a run of bytes, computed where they are: on the CPU or on the GPU."""

from collections.abc import Iterable
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
"""

# Odd, and with about as many ones as zeros. STEP is 2**64 / golden ratio; the others are the
# multipliers of Stafford's variant 13 of MurmurHash3's finalizer, and the first one of variant 1.
_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_LENGTH = 0x7FB5D329728EA185
_SHIFTS = (32, 29, 32)
_WORD_BYTES = 8
_MASK = (1 << 64) - 1

# What is worked on at a time should stay in the cache. Three such buffers are needed: on a GPU
# that an engine has filled, verifying has to make do with little memory.
_CPU_CHUNK_BYTES = 1 << 20
_CUDA_CHUNK_BYTES = 16 << 20


def digest(data: "torch.Tensor", *, chunk_bytes: int | None = None) -> str:
    """``mix64:`` and 16 hexadecimal digits over ``data``, a contiguous uint8[n] on any device.

    Neither the device nor ``chunk_bytes``, how much is worked on at a time, changes the result.
    """
    return digests([data], chunk_bytes=chunk_bytes)[0]


def digests(data: Iterable["torch.Tensor"], *, chunk_bytes: int | None = None) -> list[str]:
    """The :func:`digest` of each, for many runs at once.

    Buffers are shared, and the device is waited for once, at the end.
    """
    workspaces: dict[torch.device, _Workspace] = {}
    sums: list[torch.Tensor] = []
    lengths: list[int] = []
    for tensor in data:
        _check(tensor)
        workspace = workspaces.get(tensor.device)
        if workspace is None:
            workspace = workspaces[tensor.device] = _Workspace(tensor.device, chunk_bytes)
        sums.append(workspace.total(tensor))
        lengths.append(tensor.numel())
    return [_finish(total, nbytes) for total, nbytes in zip(_values(sums), lengths, strict=True)]


class _Workspace:
    """Buffers on one device, as large as the largest chunk that has been asked for."""

    def __init__(self, device: "torch.device", chunk_bytes: int | None) -> None:
        import torch

        if chunk_bytes is None:
            chunk_bytes = _CUDA_CHUNK_BYTES if device.type == "cuda" else _CPU_CHUNK_BYTES
        self._words = max(1, chunk_bytes // _WORD_BYTES)
        self._device = device
        self._buffers = torch.empty((3, 0), dtype=torch.int64, device=device)

    def total(self, data: "torch.Tensor") -> "torch.Tensor":
        """The sum of all mixed words as int64[] on the device, without waiting for it."""
        import torch

        total = torch.zeros((), dtype=torch.int64, device=self._device)
        whole = data.numel() // _WORD_BYTES
        self._grow(min(self._words, whole + 1))
        for first in range(0, whole, self._words):
            count = min(self._words, whole - first)
            total += self._mixed(_words(data, first, count), first)
        if rest := data.numel() % _WORD_BYTES:
            tail = torch.zeros(_WORD_BYTES, dtype=torch.uint8, device=self._device)
            tail[:rest] = data[-rest:]
            total += self._mixed(tail.view(torch.int64), whole)
        return total

    def _grow(self, words: int) -> None:
        import torch

        if self._buffers.shape[1] >= words:
            return
        # The first buffer holds what the position adds to the words of a chunk at position 0.
        self._buffers = torch.empty((3, words), dtype=torch.int64, device=self._device)
        torch.arange(words, out=self._buffers[0])
        self._buffers[0].mul_(_signed(_STEP))

    def _mixed(self, words: "torch.Tensor", first: int) -> "torch.Tensor":
        """The sum of ``words``, the first of which is at position ``first``, after mixing."""
        import torch

        steps, mixed, shifted = self._buffers[:, : words.numel()].unbind()
        torch.add(words, steps, out=mixed)
        if first:
            mixed.add_(_signed(first * _STEP))
        for shift, factor in zip(_SHIFTS, (_FIRST, _SECOND, None), strict=True):
            # torch shifts signed words, and so copies the sign into the bits that come free: they
            # would all cancel the sign itself, and two flipped sign bits would go unseen.
            torch.bitwise_right_shift(mixed, shift, out=shifted)
            mixed.bitwise_xor_(shifted.bitwise_and_(_MASK >> shift))
            if factor is not None:
                mixed.mul_(_signed(factor))
        return mixed.sum()


def _check(data: "torch.Tensor") -> None:
    import torch

    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise ValueError(f"expected contiguous uint8[n], got {data.dtype} {tuple(data.shape)}")


def _words(data: "torch.Tensor", first: int, count: int) -> "torch.Tensor":
    """``count`` words from word ``first`` on; copied only where they do not lie on 8 bytes."""
    import torch

    piece = data[first * _WORD_BYTES : (first + count) * _WORD_BYTES]
    if piece.storage_offset() % _WORD_BYTES or piece.data_ptr() % _WORD_BYTES:
        piece = piece.clone()
    return piece.view(torch.int64)


def _values(sums: "list[torch.Tensor]") -> list[int]:
    """Fetches the sums, with one transfer where they are all on one device."""
    import torch

    if len({total.device for total in sums}) == 1:
        return [int(value) for value in torch.stack(sums).tolist()]
    return [int(total.item()) for total in sums]


def _finish(total: int, nbytes: int) -> str:
    value = (total + nbytes * _LENGTH) & _MASK
    for shift, factor in zip(_SHIFTS, (_FIRST, _SECOND, 1), strict=True):
        value = (value ^ value >> shift) * factor & _MASK
    return f"{ALGORITHM}:{value:016x}"


def _signed(value: int) -> int:
    """``value`` modulo 2**64 as torch's int64 holds it."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
