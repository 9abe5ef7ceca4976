"""Where a fingerprint comes from: a model and options of ``up``, a file, or a running rank."""

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from wcache.checkpoint import Checkpoint, Identity, IdentityCache
from wcache.checkpoint.document import parse_object, read_document
from wcache.config import Config
from wcache.errors import (
    CheckpointError,
    ConfigError,
    ExitCode,
    NoSuchRankError,
    NotReadyError,
    UsageError,
    WcacheError,
)
from wcache.fingerprint import Fingerprint
from wcache.machine import devices
from wcache.output import Output, counted
from wcache.paths import InstancePaths
from wcache.ranks import ask, known_ranks, not_up, read_config
from wcache.rollout.wanted import Args, from_model

MAX_FINGERPRINT_BYTES = 1 << 20
_RANK = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*:)?[0-9]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A fingerprint, and what it is of."""

    name: str
    """For people."""
    fingerprint: Fingerprint
    identity: Identity | None = None
    """Of the checkpoint; None where there is none to look at."""


def is_file(model: str) -> bool:
    """True for what must be read as a fingerprint; a folder or a hub id is a model."""
    with contextlib.suppress(OSError):
        return Path(model).expanduser().is_file()
    return False  # what is wrong with it is said when the model is looked for


def of_model(
    args: Args, model: str, rank: int, paths: InstancePaths, out: Output, *, is_compared: bool
) -> Source:
    """What ``up`` with ``args`` would have ``rank`` of the instance hold.

    All but what only a loader knows: torch's version and the device's capability. Raises what
    ``up`` raises before it starts anything; to be compared, weights need not be such as its own
    loader can make. Nothing is downloaded.
    """
    from wcache.load.job import fingerprint

    if _RANK.fullmatch(model) and not Path(model).exists():
        raise UsageError(
            f"{model!r} is no model", hint=f"a rank that is running is given as --running {model}"
        )
    try:
        old = read_config(paths)
    except ConfigError as error:
        old = None
        out.warn(f"GPUs may be chosen otherwise: {error.message}")
    visible = () if args.device == "cpu" else devices.visible_gpus()
    cache = IdentityCache(paths.identity_folder)
    wanted = from_model(args, model, old, visible, identities=cache, download=False)
    checkpoint, identity = wanted.checkpoint, wanted.identity
    if checkpoint is None or identity is None:
        raise UsageError("weights that an engine publishes have no fingerprint before")
    world = wanted.config.ranks.world_size
    if rank >= world:
        raise NoSuchRankError(
            f"these options make {counted(world, 'rank')}, and none with number {rank}",
            hint="--tp, --pp and --dp are those of wcache up",
        )
    try:
        _check_can_be_loaded(wanted.config, checkpoint, rank, paths, out)
    except CheckpointError as error:
        if not is_compared:
            raise
        out.warn(f"wcache up would refuse this: {error.message}")
    return Source(
        name=f"rank {rank} of {model}" if world > 1 else model,
        fingerprint=fingerprint(wanted.config, rank, checkpoint, identity, {}),
        identity=identity,
    )


def _check_can_be_loaded(
    config: Config, checkpoint: Checkpoint, rank: int, paths: InstancePaths, out: Output
) -> None:
    """Raises :class:`CheckpointError` for a shard that no loader can make, in the words of ``up``.

    transformers is not asked: importing a model takes it seconds, of a command that takes a tenth
    of one. What an ``up`` was told is kept, so this is known of what was ever loaded here.
    """
    from wcache.load.architectures import Architectures, NotAskedError
    from wcache.load.placement import plan

    layout, model = config.ranks, config.model
    if layout.tp == layout.pp == layout.ep == 1 and model.dtype == model.quantization == "auto":
        return  # as it is: planning 100,000 tensors takes half a second, and would refuse nothing
    kept = Architectures(paths.architecture_folder, keep=False, asks=False)
    try:
        plan(checkpoint, config, rank, kept)
    except NotAskedError:
        out.say("whether it can be spread or quantized so, wcache up finds out: this architecture"
                " was not loaded here before")  # fmt: skip


def of_file(path: Path) -> Source:
    """Reads a ``fingerprint.json``; raises :class:`WcacheError` for what is none."""
    try:
        raw = parse_object(read_document(path, MAX_FINGERPRINT_BYTES), str(path))
        fingerprint = msgspec.convert(raw, Fingerprint)
    except (CheckpointError, msgspec.ValidationError) as error:
        raise _no_fingerprint(str(error), path) from None
    known = {field.name for field in msgspec.structs.fields(Fingerprint)}
    if unknown := sorted(raw.keys() - known):
        # Weights of a newer wcache may differ in just that field.
        raise _no_fingerprint(f"this wcache knows no field {unknown[0][:40]!r}", path)
    if fingerprint.content is None and fingerprint.model is None:
        raise _no_fingerprint("it names no model", path)
    return Source(name=str(path), fingerprint=fingerprint)


def of_running(paths: InstancePaths, rank: int) -> Source:
    """What a rank serves.

    Raises :class:`NoSuchRankError` for a rank that nobody knows, and :class:`NotReadyError` for one
    that is not up or has no weights.
    """
    where = paths.rank(rank)
    report = ask(where)
    if report is None and rank in known_ranks(paths):
        raise not_up([rank])
    if report is None:
        raise NoSuchRankError(
            f"no daemon answers for rank {where.id}", hint="wcache status shows which ranks are up"
        )
    if report.serving is None:
        raise NotReadyError(f"rank {where.id} serves no weights: {report.status}")
    return Source(name=f"running rank {where.id}", fingerprint=report.serving.fingerprint)


def _no_fingerprint(reason: str, path: Path) -> WcacheError:
    return WcacheError(
        f"no fingerprint: {reason if str(path) in reason else f'{path}: {reason}'}",
        hint="a rank that runs has a fingerprint.json in its folder below the run folder",
        exit_code=ExitCode.CONFIGURATION,
    )
