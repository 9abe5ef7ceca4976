"""The two streams of a command: what is done where one of them takes nothing more."""

import contextlib
import sys

from wcache.errors import WcacheError


def talk(text: str, end: str = "\n") -> None:
    """Writes to stderr at once; what can not be said is not said.

    The log may be on a full disk and the reader may be gone: neither is a reason to give up a
    rollout half-way, or to end an engine that serves.
    """
    with contextlib.suppress(OSError):
        print(text, end=end, file=sys.stderr, flush=True)


class StdoutError(WcacheError):
    """What a command was called for can not be written."""


def put(text: str, *, flush: bool = False) -> None:
    """Writes a line of data to stdout.

    Raises :class:`StdoutError` where there is no room for it, and :class:`BrokenPipeError` where
    there is no reader any more.
    """
    try:
        print(text, flush=flush)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise stdout_error(error) from None


def stdout_error(error: OSError) -> StdoutError:
    """What to say when stdout took nothing more."""
    return StdoutError(f"stdout can not be written: {(error.strerror or str(error)).lower()}")
