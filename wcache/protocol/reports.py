"""What a daemon tells of each generation, lease and load. Pure."""

from typing import Literal

import msgspec

from wcache.config import Config
from wcache.fingerprint import Fingerprint

How = Literal[
    "loaded",  # by a loader, from a checkpoint
    "published",  # by an engine that had loaded them for itself
    "adopted",  # from the supervisor, which kept them while there was no daemon
    "reclaimed",  # from an engine that had them mapped
]
GenerationRole = Literal[
    "serving",  # given to whoever attaches
    "staged",  # loaded, and not served before an operator says so
    "held",  # served before, and kept so that an operator can go back to it
    "draining",  # freed when its last lease ends
]


class GenerationReport(msgspec.Struct, frozen=True, kw_only=True):
    """One generation that is held."""

    number: int
    serving: bool
    role: GenerationRole = "serving"
    config: Config | None = None
    """What it was loaded for, without ``[access]``; None when that is not known."""
    how: How
    manifest_digest: str
    fingerprint: Fingerprint
    fingerprint_digest: str
    weight_bytes: int
    slab_bytes: int
    slabs: int
    storages: int
    tensors: int
    since: float
    """Unix time at which this daemon took it."""


class FreedReport(msgspec.Struct, frozen=True, kw_only=True):
    """The generation that a daemon has freed last."""

    number: int
    at: float
    """Unix time."""
    slab_bytes: int


class LeaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """One client that is attached."""

    pid: int
    uid: int
    command: str
    generation: int
    since: float


class ProgressReport(msgspec.Struct, frozen=True, kw_only=True):
    """The load that is under way."""

    generation: int
    loader_pid: int
    phase: str
    done_bytes: int
    total_bytes: int
    since: float
