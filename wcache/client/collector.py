"""Keeps Python's garbage collector out of the making of many tensors."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """For code that makes tens of thousands of objects that all stay.

    They would set off full collections, each of which walks through every object of the engine
    and finds nothing: with transformers imported, 200 ms in an attach of 60 ms (measured).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
