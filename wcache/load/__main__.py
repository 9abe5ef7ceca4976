"""``python -m wcache.load RANK``: loads one rank's weights and ends."""

import logging
import sys

from wcache.errors import ExitCode, UsageError, WcacheError
from wcache.load.job import run
from wcache.log import setup_logging
from wcache.paths import RankId

log = logging.getLogger("wcache.load")


def main(arguments: list[str]) -> int:
    """Returns the exit status; a bug leaves as a traceback."""
    setup_logging("loader", arguments[0] if arguments else "?")
    try:
        if len(arguments) != 1:
            raise UsageError("usage: python -m wcache.load RANK", hint="RANK is 3 or NAME:3")
        run(RankId.parse(arguments[0]))
    except WcacheError as error:
        log.error("%s%s", error.message, f" (hint: {error.hint})" if error.hint else "")
        return error.exit_code
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
