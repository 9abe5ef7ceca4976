"""``python -m wcache.supervise [INSTANCE]``: the supervisor without a command line around it."""

import argparse
import logging
import os
import sys

from wcache.errors import WcacheError
from wcache.log import setup_logging
from wcache.paths import check_instance_name
from wcache.supervise.direct.parent import run
from wcache.supervise.direct.timing import Commands, Timing

log = logging.getLogger("wcache.supervise")


def main(
    arguments: list[str], *, timing: Timing | None = None, commands: Commands | None = None
) -> int:
    """Errors that an operator can mend are logged, and are the exit code."""
    parser = argparse.ArgumentParser(prog="wcache.supervise", description=__doc__)
    parser.add_argument("instance", nargs="?", default="")
    parser.add_argument("--empty", action="store_true", help="start no rank without a command")
    parser.add_argument("--detach", action="store_true", help="go to the background, end when idle")
    parser.add_argument("--ready-fd", type=int, help="where to say that commands are taken")
    given = parser.parse_args(arguments)
    setup_logging("supervise", given.instance or "default")
    try:
        if given.instance:
            check_instance_name(given.instance)
        if given.detach:
            _detach()
        return run(
            given.instance,
            start_configured=not given.empty,
            ends_when_idle=given.detach,
            ready_fd=given.ready_fd,
            timing=timing,
            commands=commands,
        )
    except WcacheError as error:
        for line in getattr(error, "problems", ()) or (error.message,):
            log.error("%s", line)
        if error.hint:
            log.error("hint: %s", error.hint)
        return error.exit_code


def _detach() -> None:
    """Leaves the process that launched this one, and its terminal, for good."""
    if os.fork():
        os._exit(0)
    os.setsid()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
