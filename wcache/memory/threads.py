"""Threads of our own, in each of which torch does its operations alone."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

T = TypeVar("T")
P = ParamSpec("P")

_starting = threading.Lock()


def in_threads(count: int, work: Callable[[], T]) -> list[T]:
    """Calls ``work`` in ``count`` threads at once, and returns what each of them returned.

    How many threads torch spreads an operation over is a number of each thread; one that is new
    takes the process's number once, at its first operation. Ours take 1, while the process has 1
    for as long as they take to start; no thread that was there before is touched. The first
    exception of ``work`` is raised when all threads have ended.
    """
    started, restored = threading.Barrier(count + 1), threading.Event()

    def begin() -> T:
        torch.set_num_threads(1)
        torch.get_num_threads()  # counts as the first operation
        started.wait()
        restored.wait()
        return work()

    with ThreadPoolExecutor(count, thread_name_prefix="wcache-digest") as pool:
        with _starting:
            # The calling thread may have a number of its own, so it can neither tell nor set it.
            before = _in_new_thread(torch.get_num_threads)
            try:
                futures = [pool.submit(begin) for _ in range(count)]
                started.wait()
            except BaseException:
                started.abort()
                restored.set()
                pool.shutdown()  # what is begun sets the number, which is restored after it
                raise
            finally:
                try:
                    _in_new_thread(torch.set_num_threads, before)
                finally:
                    restored.set()
        return [future.result() for future in futures]


def _in_new_thread(do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    with ThreadPoolExecutor(1) as one:
        return one.submit(do, *args, **kwargs).result()
