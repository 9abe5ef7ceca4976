"""``python -m wcache`` is ``wcache``."""

import sys

from wcache.cli import run

if __name__ == "__main__":
    sys.exit(run())
