"""What ``wcache run`` must know of an engine: one small protocol, which each engine implements.

An adapter has two halves. This one runs in wcache's own process, so it imports neither torch nor
the engine. The other half runs inside the engine (a plugin, or one line in a script) and reads its
orders from the environment: :mod:`wcache.engines.orders`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from wcache.config import Loader
from wcache.engines.orders import Orders


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What a command line asks for, as far as it decides which weights fit."""

    model: str | None = None
    """Folder or hub id; None where only the script knows."""
    revision: str | None = None
    dtype: str | None = None
    tp: int = 1
    pp: int = 1
    dp: int = 1
    quantization: str | None = None

    @property
    def ranks(self) -> int:
        """How many ranks the engine will have."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What is started in place of the operator's command."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set beside those that are there."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A line of the engine's own log that ends a phase of its start."""

    phase: str
    """Name of the phase that is over, one of :data:`wcache.run.timeline.PHASES`."""
    pattern: re.Pattern[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Where a token can be had as soon as the engine is semantically ready."""

    host: str
    port: int
    path: str
    body: Mapping[str, object]
    """A completion of one token, as JSON."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """An API key, say."""


@dataclass(frozen=True, slots=True)
class Sign:
    """For an engine that can not be asked for a token: it counts as ready when a phase is over."""

    phase: str
    """One that :attr:`Engine.marks` tells the end of."""


class Engine(Protocol):
    """One kind of engine; stateless. Every name below is free of torch and of the engine."""

    @property
    def name(self) -> str:
        """As the fingerprint and the records have it: ``vllm``, ``transformers``."""

    @property
    def marks(self) -> Sequence[Mark]:
        """What its log says of its start; empty when its output is not to be read."""

    @property
    def runs_ranks_in_order(self) -> bool:
        """Whether rank n runs on the nth GPU that it sees, wherever that rank's weights are."""

    def loaders(self, wish: Wish) -> Sequence[Loader]:
        """Those that fill ranks as this engine wants them.

        ``wcache run --mode daemon`` takes the first one where none of them is configured.
        """

    def recognises(self, argv: Sequence[str]) -> bool:
        """True for a command that starts this engine."""

    def wish(self, argv: Sequence[str]) -> Wish:
        """Raises :class:`wcache.errors.UsageError` for a command that can not be read."""

    def launch(self, argv: Sequence[str], orders: Orders) -> Launch:
        """The command in client mode: flags and environment are added, nothing is overridden.

        Raises :class:`wcache.errors.UsageError` that names the option where what the operator gave
        contradicts client mode, or asks for a feature that can not be had over a read-only map.
        """

    def probe(self, argv: Sequence[str]) -> Probe | Sign | None:
        """How it is known that the engine serves; None where it says so itself, by an event."""
