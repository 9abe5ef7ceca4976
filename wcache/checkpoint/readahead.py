"""Reading the parts of a checkpoint's files ahead, so that they are in the page cache."""

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock

from wcache.checkpoint.document import unreadable
from wcache.checkpoint.header import TensorEntry
from wcache.errors import CheckpointError

CHUNK_BYTES = 8 << 20
_READERS = 4

Range = tuple[int, int]
"""First byte in a file, and the one after the last."""


def file_ranges(entries: Iterable[TensorEntry]) -> dict[str, list[Range]]:
    """The parts of each file, by its name, that ``entries`` lie in. Pure.

    Ranges are in order, do not overlap, and are joined where they touch.
    """
    found: dict[str, list[Range]] = {}
    for entry in sorted(set(entries), key=lambda one: (one.file, one.start)):
        if not entry.nbytes:
            continue
        ranges = found.setdefault(entry.file, [])
        start, stop = entry.start, entry.start + entry.nbytes
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(stop, ranges[-1][1])
        else:
            ranges.append((start, stop))
    return found


def total_bytes(ranges: Mapping[str, Iterable[Range]]) -> int:
    return sum(stop - start for parts in ranges.values() for start, stop in parts)


def read_ahead(
    folder: Path, ranges: Mapping[str, Iterable[Range]], progress: Callable[[int], None]
) -> None:
    """Reads ``ranges`` and keeps nothing of them; ``progress`` is told the bytes done so far.

    Raises :class:`CheckpointError` for a file that can not be read to its end.
    """
    chunks = [
        (name, begin, min(begin + CHUNK_BYTES, stop))
        for name, parts in ranges.items()
        for start, stop in parts
        for begin in range(start, stop, CHUNK_BYTES)
    ]
    descriptors: dict[str, int] = {}
    ended, lock, done = Event(), Lock(), [0]

    def read(chunk: tuple[str, int, int]) -> None:
        name, begin, stop = chunk
        buffer = memoryview(bytearray(min(CHUNK_BYTES, stop - begin)))
        while begin < stop and not ended.is_set():
            count = os.preadv(descriptors[name], [buffer[: stop - begin]], begin)
            if not count:
                raise CheckpointError(f"{folder / name} ends at byte {begin}: it was changed")
            begin += count
            with lock:
                done[0] += count
                progress(done[0])

    try:
        for name in ranges:
            descriptors[name] = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
        with ThreadPoolExecutor(max_workers=_READERS) as pool:
            try:
                for _ in pool.map(read, chunks):
                    pass
            except BaseException:
                ended.set()
                pool.shutdown(cancel_futures=True)
                raise
    except OSError as error:
        raise unreadable(Path(error.filename or folder), error) from None
    finally:
        for fd in descriptors.values():
            os.close(fd)
