"""Finding the engine behind programs that run another one, as ``env`` and ``uv run`` do. Pure."""

from collections.abc import Sequence
from pathlib import PurePath

from wcache.engines import engine_for
from wcache.engines.interface import Engine

# Each leaves the environment as it is but for what its own arguments say, and the command in its
# own process group: what is added to the end of the line and to the environment gets through.
_WRAPPERS = frozenset({
    "chrt", "conda", "dumb-init", "env", "ionice", "mamba", "micromamba", "nice", "nohup", "nsys",
    "numactl", "pdm", "pixi", "poetry", "prlimit", "stdbuf", "taskset", "time", "tini", "uv", "uvx",
})  # fmt: skip


def find_engine(argv: Sequence[str]) -> tuple[Engine | None, int]:
    """The engine that ``argv`` starts, and where in it the engine's own command begins.

    The arguments of a wrapper are not understood: the engine is the first one that begins behind
    it, with a word that is neither an option nor a variable. None and 0 for a command that starts
    none.
    """
    engine = engine_for(argv)
    if engine is not None or not argv or PurePath(argv[0]).name not in _WRAPPERS:
        return engine, 0
    for place in range(1, len(argv)):
        if argv[place].startswith("-") or "=" in argv[place]:
            continue
        engine = engine_for(argv[place:])
        if engine is not None:
            return engine, place
    return None, 0
