"""``python -m wcache.load RANK``: loads one rank's weights and ends."""

import contextlib
import logging
import os
import sys
from typing import NoReturn

from wcache.errors import ExitCode, UsageError, WcacheError
from wcache.load.job import run
from wcache.log import setup_logging
from wcache.machine import open_files
from wcache.paths import RankId

log = logging.getLogger("wcache.load")


def main(arguments: list[str]) -> int:
    """Returns the exit status; a bug leaves as a traceback."""
    setup_logging("loader", arguments[0] if arguments else "?")
    try:
        if len(arguments) != 1:
            raise UsageError("usage: python -m wcache.load RANK", hint="RANK is 3 or NAME:3")
        rank_id = RankId.parse(arguments[0])
        open_files.raise_limit()
        run(rank_id)
    except WcacheError as error:
        log.error("%s%s", error.message, f" (hint: {error.hint})" if error.hint else "")
        return error.exit_code
    return ExitCode.DONE


def leave(status: int) -> NoReturn:
    """Ends this process at once, whatever an engine's loader has left in it.

    After vLLM's own on an H200 (one rank) a process that had begun with the load stayed for as long
    as the weights were served, with 0.6 GiB of context; ended so, it is gone from the GPU within
    2 s. The next loader waits for this one's end. Python's own tidying up took 2 s after vLLM's on
    the CPU. What is to be kept is the daemon's by now.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # Nobody reads it any more, or an engine has closed it or put something else in its place.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    try:
        STATUS = main(sys.argv[1:])
    except Exception:
        log.exception("the load ended by a bug")
        STATUS = 1
    leave(STATUS)
