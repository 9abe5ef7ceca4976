"""Sums of mixed words (:mod:`wcache.memory.digest`) by torch's own operations, on any device."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter

import torch

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
# On the CPU it is small enough for torch to do each operation in the calling thread (it spreads
# operations over its pool from 32,768 elements on). Threads of our own, with chunks of their own,
# meet once at the end; torch's meet after every operation, and where the cores are shared with
# others each meeting waits for the one that is not running: 0.05 GB/s instead of 3 (measured).
_CPU_CHUNK_BYTES = 240 << 10
_CUDA_CHUNK_BYTES = 16 << 20
_TASK_BYTES = 8 << 20
# Python's lock is held for a fifth of an operation, so more threads would only wait for it.
_MAX_THREADS = 8

Run = tuple[torch.Tensor, int]
"""A contiguous uint8[n], and the position, in words, of its first word."""


def sums(runs: Iterable[Run], *, chunk_bytes: int | None = None) -> list[int]:
    """The sum of the mixed words of each run, modulo 2**64."""
    tasks = [
        (number, data, position)
        for number, run in enumerate(runs)
        for data, position in _pieces(*run)
    ]
    on_cpu = all(data.device.type == "cpu" for _, data, _ in tasks)
    threads = min(_MAX_THREADS, torch.get_num_threads(), len(tasks)) if on_cpu else 1
    total_bytes = sum(data.numel() for _, data, _ in tasks)
    if threads > 1 and total_bytes > _TASK_BYTES:
        with ThreadPoolExecutor(threads, thread_name_prefix="wcache-digest") as pool:
            found = list(pool.map(lambda share: _work(share, chunk_bytes), _shares(tasks)))
            totals = [pair for pairs in found for pair in pairs]
    else:
        totals = _work(tasks, chunk_bytes)
    # Every run has one piece at least, and its pieces follow each other.
    return [
        sum(value for _, value in group) & MASK for _, group in groupby(totals, key=itemgetter(0))
    ]


Task = tuple[int, torch.Tensor, int]


def _pieces(data: torch.Tensor, position: int) -> Iterator[Run]:
    if data.device.type != "cpu" or data.numel() <= _TASK_BYTES:
        yield data, position
        return
    for start in range(0, data.numel(), _TASK_BYTES):
        yield data[start : start + _TASK_BYTES], position + start // WORD_BYTES


def _shares(tasks: list[Task]) -> Iterator[list[Task]]:
    """Small pieces together, so that a thread is not woken for each of thousands."""
    share: list[Task] = []
    nbytes = 0
    for task in tasks:
        share.append(task)
        nbytes += task[1].numel()
        if nbytes >= _TASK_BYTES:
            yield share
            share, nbytes = [], 0
    if share:
        yield share


def _work(tasks: list[Task], chunk_bytes: int | None) -> list[tuple[int, int]]:
    """(number, sum) of each task, after one wait for the device."""
    workspaces: dict[torch.device, _Workspace] = {}
    totals: list[torch.Tensor] = []
    for _, data, position in tasks:
        workspace = workspaces.get(data.device)
        if workspace is None:
            workspace = workspaces[data.device] = _Workspace(data.device, chunk_bytes)
        totals.append(workspace.total(data, position))
    numbers = (number for number, _, _ in tasks)
    return list(zip(numbers, _values(totals), strict=True))


class _Workspace:
    """Buffers on one device, as large as the largest chunk that has been asked for.

    Three of them: on a GPU that an engine has filled, verifying has to make do with little memory.
    """

    def __init__(self, device: torch.device, chunk_bytes: int | None) -> None:
        if chunk_bytes is None:
            chunk_bytes = _CUDA_CHUNK_BYTES if device.type == "cuda" else _CPU_CHUNK_BYTES
        self._words = max(1, chunk_bytes // WORD_BYTES)
        self._device = device
        self._buffers = torch.empty((3, 0), dtype=torch.int64, device=device)

    def total(self, data: torch.Tensor, position: int) -> torch.Tensor:
        """The sum of all mixed words as int64[] on the device, without waiting for it."""
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
        self._buffers[0].mul_(_signed(STEP))

    def _mixed(self, words: torch.Tensor, first: int) -> torch.Tensor:
        """The sum of ``words``, the first of which is at position ``first``, after mixing."""
        steps, mixed, shifted = self._buffers[:, : words.numel()].unbind()
        torch.add(words, steps, out=mixed)
        if first:
            mixed.add_(_signed(first * STEP))
        for shift, factor in zip(SHIFTS, (FIRST, SECOND, None), strict=True):
            # torch shifts signed words, and so copies the sign into the bits that come free: they
            # would all cancel the sign itself, and two flipped sign bits would go unseen.
            torch.bitwise_right_shift(mixed, shift, out=shifted)
            mixed.bitwise_xor_(shifted.bitwise_and_(MASK >> shift))
            if factor is not None:
                mixed.mul_(_signed(factor))
        return mixed.sum()


def _words(data: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """``count`` words from word ``first`` on; copied only where they do not lie on 8 bytes."""
    piece = data[first * WORD_BYTES : (first + count) * WORD_BYTES]
    if piece.storage_offset() % WORD_BYTES or piece.data_ptr() % WORD_BYTES:
        piece = piece.clone()
    return piece.view(torch.int64)


def _values(totals: list[torch.Tensor]) -> list[int]:
    """Fetches the sums, with one transfer where they are all on one device."""
    if len({total.device for total in totals}) == 1:
        return [int(value) for value in torch.stack(totals).tolist()]
    return [int(total.item()) for total in totals]


def _signed(value: int) -> int:
    """``value`` modulo 2**64 as torch's int64 holds it."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value
