"""``wcache``, also as ``python -m wcache``."""

import gc
import sys


def main() -> None:
    """The console script."""
    # Imports make many objects and no garbage: looking for some took a tenth of the time of a
    # status (scripts/bench_status.py).
    gc.set_threshold(100_000)
    from wcache.cli import run

    code = run()
    # Nor is there any to look for now: with torch and transformers that took a second, after the
    # table of an up, before the prompt.
    gc.freeze()
    sys.exit(code)


if __name__ == "__main__":
    main()
