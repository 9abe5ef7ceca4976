"""How engines take weights from the cache: one folder an engine, and what all of them implement.

A new engine is a folder of its own and a line in :func:`engines`.
"""

from collections.abc import Sequence

from wcache.engines.interface import Engine


def engines() -> tuple[Engine, ...]:
    """All that are known, in the order in which they are asked; none imports its engine."""
    from wcache.engines.transformers.launch import Transformers
    from wcache.engines.vllm.launch import Vllm

    # A script may be anything, so it comes last.
    return (Vllm(), Transformers())


def engine_for(argv: Sequence[str]) -> Engine | None:
    """The engine that ``argv`` starts; None for any other command."""
    return next((engine for engine in engines() if engine.recognises(argv)), None)
