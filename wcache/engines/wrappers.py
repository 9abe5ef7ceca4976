"""Finding the engine behind programs that run another one, as ``env`` and ``uv run`` do. Pure."""

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from wcache.engines import engine_for
from wcache.engines.interface import Engine
from wcache.engines.python import program_of

# Each leaves the environment as it is but for what its own arguments say, and the command in its
# own process group: what is added to the end of the line and to the environment gets through.
_WRAPPERS = frozenset({
    "chrt", "conda", "dumb-init", "env", "ionice", "mamba", "micromamba", "nice", "nohup", "nsys",
    "numactl", "pdm", "pixi", "poetry", "prlimit", "stdbuf", "taskset", "time", "tini", "uv", "uvx",
})  # fmt: skip
# Known by their command and their Python package, and without an adapter of ours.
_UNADAPTED = {"sglang": "SGLang"}


def find_engine(argv: Sequence[str]) -> tuple[Engine | None, int]:
    """The engine that ``argv`` starts, and where in it the engine's own command begins.

    The arguments of a wrapper are not understood: the engine is the first one that begins behind
    it, with a word that is neither an option nor a variable. None and 0 for a command that starts
    none.
    """
    for place in _beginnings(argv):
        engine = engine_for(argv[place:])
        if engine is not None:
            return engine, place
    return None, 0


def unadapted(argv: Sequence[str]) -> str:
    """The engine that ``argv`` starts and that wcache can not give weights to; empty for others."""
    for place in _beginnings(argv):
        program = program_of(argv[place:])
        word = program.module.partition(".")[0] if program else PurePath(argv[place]).name
        if word in _UNADAPTED:
            return _UNADAPTED[word]
    return ""


def _beginnings(argv: Sequence[str]) -> Iterator[int]:
    """Where an engine's own command may begin."""
    if argv:
        yield 0
    if argv and PurePath(argv[0]).name in _WRAPPERS:
        for place in range(1, len(argv)):
            if not argv[place].startswith("-") and "=" not in argv[place]:
                yield place
