"""``wcache``, also as ``python -m wcache``."""

import gc
import sys

INTERRUPTED = 130


def main() -> None:
    """The console script."""
    try:
        code = _run()
    except KeyboardInterrupt:
        # Also while the command is still being imported, which is most of the time of many.
        sys.exit(INTERRUPTED)
    # There is no garbage to look for now: with torch and transformers that took a second, after the
    # table of an up, before the prompt.
    gc.freeze()
    sys.exit(code)


def _run() -> int:
    # Imports make many objects and no garbage: looking for some took a tenth of the time of a
    # status (scripts/bench_status.py).
    gc.set_threshold(100_000)
    from wcache.cli import run

    return run()


if __name__ == "__main__":
    main()
