"""Sums of mixed words (:mod:`wcache.memory.digest`) by torch's own operations, on any device."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from wcache.memory.threads import in_threads

WORD_BYTES = 8
MASK = (1 << 64) - 1

# Odd, and with about as many ones as zeros. STEP is 2**64 / golden ratio; the others are the
# multipliers of Stafford's variant 13 of MurmurHash3's finalizer.
STEP = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
SHIFTS = (32, 29, 32)

# What is worked on at a time should stay in the cache. On a GPU a chunk is as large as the
# launches of its fourteen operations need it to be.
#
# On the CPU threads of our own, with chunks of their own, meet once at the end. Torch's threads
# meet after every operation, and where the cores are shared with others each meeting waits for the
# one that is not running: 0.05 GB/s instead of 3 (measured). So an operation must stay in the
# thread that calls it: because torch was told so (in_threads, read_plan), or else because the chunk
# is so small that torch does not spread it (it does from 32,768 elements on). With small chunks
# threads wait for Python's lock: 240 KiB make 2.56 GB/s in one thread and 3.13 in two on two cores,
# 480 KiB 2.77 and 4.33, 1 MiB 2.90 and 5.32, 2 MiB 2.90 and 5.52; in read_plan, which reads the
# bytes before, 1.9, 2.4, 2.7 and 2.6. Half of the time goes into two multiplications and the first
# addition; to take the shifts by 32 as 32-bit words saved 3 %, and was not worth its lines.
_CPU_CHUNK_BYTES = 1 << 20
_UNSPREAD_CHUNK_BYTES = 240 << 10
_CUDA_CHUNK_BYTES = 16 << 20
_TASK_BYTES = 8 << 20
# Python's lock is held for a fifteenth of the time (20 of 330 us), so more would only wait for it.
_MAX_THREADS = 12

Span = tuple[int, int]
"""Offset and length of a run, in bytes."""


def sums(
    content: torch.Tensor, spans: Sequence[Span], *, chunk_bytes: int | None = None
) -> torch.Tensor:
    """The sum of the mixed words of each of ``spans`` of ``content``, uint8[n], on any device.

    Returns int64[len(spans)] on the CPU, to be read modulo 2**64.
    """
    on_cpu = content.device.type == "cpu"
    shares = deque(_shares(_tasks(spans, _TASK_BYTES if on_cpu else None)))
    threads = min(_MAX_THREADS, torch.get_num_threads(), len(shares)) if on_cpu else 1

    def work() -> tuple[list[int], torch.Tensor]:
        return _work(content, _taken(shares), chunk_bytes)

    found = in_threads(threads, work) if threads > 1 else [work()]
    totals = torch.zeros(len(spans), dtype=torch.int64)
    for numbers, parts in found:
        totals.index_add_(0, torch.tensor(numbers, dtype=torch.int64), parts)
    return totals


class Task(NamedTuple):
    """Words of one run."""

    number: int
    """Of the run."""
    start: int
    """Byte of the content."""
    nbytes: int
    position: int
    """Of the first word, within the run."""


def _tasks(spans: Iterable[Span], most_bytes: int | None) -> Iterator[Task]:
    for number, (offset, nbytes) in enumerate(spans):
        step = most_bytes or nbytes
        for done in range(0, nbytes, step or 1):
            yield Task(number, offset + done, min(step, nbytes - done), done // WORD_BYTES)


def _shares(tasks: Iterable[Task]) -> Iterator[list[Task]]:
    """Small pieces together, so that a thread has not to ask for each of thousands."""
    share: list[Task] = []
    nbytes = 0
    for task in tasks:
        share.append(task)
        nbytes += task.nbytes
        if nbytes >= _TASK_BYTES:
            yield share
            share, nbytes = [], 0
    if share:
        yield share


def _taken(shares: deque[list[Task]]) -> Iterator[Task]:
    """The tasks of shares that no other thread has taken."""
    while True:
        try:
            share = shares.popleft()
        except IndexError:
            return
        yield from share


def _work(
    content: torch.Tensor, tasks: Iterable[Task], chunk_bytes: int | None
) -> tuple[list[int], torch.Tensor]:
    """Numbers of the runs and the sums, int64[n] on the CPU; a GPU is waited for once."""
    workspace = Workspace(content.device, chunk_bytes)
    numbers: list[int] = []
    totals: list[torch.Tensor] = []
    for task in tasks:
        numbers.append(task.number)
        data = content[task.start : task.start + task.nbytes]
        totals.append(workspace.total(data, task.position))
    return numbers, torch.stack(totals).cpu() if totals else torch.empty(0, dtype=torch.int64)


def mix(values: torch.Tensor, shifted: torch.Tensor) -> None:
    """Mixes int64[n] in place; ``shifted``, of the same shape, is overwritten."""
    for shift, factor in zip(SHIFTS, (FIRST, SECOND, None), strict=True):
        # torch shifts signed words, and so copies the sign into the bits that come free: they
        # would all cancel the sign itself, and two flipped sign bits would go unseen.
        torch.bitwise_right_shift(values, shift, out=shifted)
        values.bitwise_xor_(shifted.bitwise_and_(MASK >> shift))
        if factor is not None:
            values.mul_(signed(factor))


class Workspace:
    """Buffers on one device, for one thread, as large as the largest chunk that was asked for.

    Three of them: on a GPU that an engine has filled, verifying has to make do with little memory.
    To make them anew for every few MiB costs 6 % on a CPU (measured).
    """

    def __init__(self, device: torch.device, chunk_bytes: int | None = None) -> None:
        if chunk_bytes is None:
            chunk_bytes = _default_chunk_bytes(device)
        self._words = max(1, chunk_bytes // WORD_BYTES)
        self._device = device
        self._buffers = torch.empty((3, 0), dtype=torch.int64, device=device)

    def total(self, data: torch.Tensor, position: int) -> torch.Tensor:
        """The sum of all mixed words of ``data``, contiguous uint8[n] on the device, the first of
        which is at ``position``: int64[] on the device, without waiting for it."""
        whole, rest = divmod(data.numel(), WORD_BYTES)
        self._grow(min(self._words, whole + 1))
        if 0 < whole <= self._words and not rest:
            return self._mixed(_words(data, 0, whole), position)
        total = torch.zeros((), dtype=torch.int64, device=self._device)
        for first in range(0, whole, self._words):
            count = min(self._words, whole - first)
            total += self._mixed(_words(data, first, count), position + first)
        if rest:
            tail = torch.zeros(WORD_BYTES, dtype=torch.uint8, device=self._device)
            tail[:rest] = data[-rest:]
            total += self._mixed(tail.view(torch.int64), position + whole)
        return total

    def _grow(self, words: int) -> None:
        if self._buffers.shape[1] >= words:
            return
        # The first buffer holds what the position adds to the words of a chunk at position 0.
        self._buffers = torch.empty((3, words), dtype=torch.int64, device=self._device)
        torch.arange(words, out=self._buffers[0])
        self._buffers[0].mul_(signed(STEP))

    def _mixed(self, words: torch.Tensor, first: int) -> torch.Tensor:
        """The sum of ``words``, the first of which is at position ``first``, after mixing."""
        steps, mixed, shifted = self._buffers[:, : words.numel()].unbind()
        torch.add(words, steps, out=mixed)
        if first:
            mixed.add_(signed(first * STEP))
        mix(mixed, shifted)
        return mixed.sum()


def _words(data: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """``count`` words from word ``first`` on; copied only where they do not lie on 8 bytes."""
    piece = data[first * WORD_BYTES : (first + count) * WORD_BYTES]
    if piece.storage_offset() % WORD_BYTES or piece.data_ptr() % WORD_BYTES:
        piece = piece.clone()
    return piece.view(torch.int64)


def _default_chunk_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return _CUDA_CHUNK_BYTES
    return _CPU_CHUNK_BYTES if torch.get_num_threads() == 1 else _UNSPREAD_CHUNK_BYTES


def signed(value: int) -> int:
    """``value`` modulo 2**64 as torch's int64 holds it."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value
