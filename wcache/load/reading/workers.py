"""Threads that share a row of tasks: counted, stopped together, and failing as one."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

T = TypeVar("T")

# Reading is waiting for a disk as much as copying out of the page cache, so there are some even
# where cores are few. To a GPU each has pinned memory of its own, and few fill the bus.
MIN_WORKERS = 4
MAX_WORKERS = 16
MAX_GPU_WORKERS = 8
_REPORT_S = 0.1

Worker = Callable[[], AbstractContextManager[Callable[[T], int]]]
"""Sets one thread up; what it gives does a task and says how many bytes that was."""


def worker_count(*, on_host: bool) -> int:
    """As many as this process has cores, within bounds."""
    most = MAX_WORKERS if on_host else MAX_GPU_WORKERS
    return max(MIN_WORKERS, min(most, len(os.sched_getaffinity(0))))


def work(
    tasks: Iterator[T], worker: Worker[T], count: int, progress: Callable[[int], None]
) -> None:
    """Does all ``tasks`` in ``count`` threads, begun in their order; returns with the last one.

    ``progress`` is called in the calling thread, with the bytes done so far: ten times a second,
    and at the end. The first exception of any thread, of ``tasks`` or of ``progress``, or one that
    a signal's handler raises here, ends them all after the task that each is at, and is raised.
    """
    shared = _Shared(tasks)
    threads = [
        threading.Thread(
            target=_thread, args=(shared, worker), name=f"wcache-read-{n}", daemon=True
        )
        for n in range(count)
    ]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            with shared.changed:
                shared.running += 1
            thread.start()
            started.append(thread)
        shared.gate.set()
        told = -1
        while not shared.wait():
            if shared.done_bytes != told:
                told = shared.done_bytes
                progress(told)
        if shared.error is None:
            progress(shared.done_bytes)
    finally:
        shared.stop()
        for thread in started:
            thread.join()
    if shared.error is not None:
        raise shared.error


class _Shared(Generic[T]):
    def __init__(self, tasks: Iterator[T]) -> None:
        self.changed = threading.Condition()
        self.gate = threading.Event()
        """Open once all threads are known. One whose start was interrupted is not: nobody waits for
        its end, so it must not have begun with anything."""
        self.running = 0
        self.done_bytes = 0
        self.error: BaseException | None = None
        self._tasks = tasks
        self._stopped = False

    def next(self) -> T | None:
        with self.changed:
            return None if self._stopped else next(self._tasks, None)

    def add(self, nbytes: int) -> None:
        with self.changed:
            self.done_bytes += nbytes

    def stop(self) -> None:
        with self.changed:
            self._stopped = True
        self.gate.set()

    def may_begin(self) -> bool:
        """Waits for the gate; False when there is nothing to do any more."""
        self.gate.wait()
        return not self._stopped

    def end(self, error: BaseException | None) -> None:
        with self.changed:
            self.running -= 1
            if error is not None:
                self._stopped = True
                self.error = self.error or error
            self.changed.notify()

    def wait(self) -> bool:
        """Waits a moment; True when no thread runs any more."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.running, _REPORT_S)


def _thread(shared: "_Shared[T]", worker: Worker[T]) -> None:
    error: BaseException | None = None
    try:
        if not shared.may_begin():
            return
        with worker() as do:
            while (task := shared.next()) is not None:
                shared.add(do(task))
    except BaseException as raised:  # noqa: BLE001 (a thread's outermost frame: work() raises it)
        error = raised
    finally:
        shared.end(error)
