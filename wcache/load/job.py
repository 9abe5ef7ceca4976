"""One load from its order to its publication: what ``python -m wcache.load RANK`` does."""

import hashlib
import logging
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from wcache.checkpoint import Checkpoint, Identity, identify, open_checkpoint
from wcache.config import Config
from wcache.control import Control
from wcache.errors import CheckpointError, NoSuchRankError, ProtocolError, TryAgainError
from wcache.fingerprint import Fingerprint, held_from
from wcache.load.placement import plan
from wcache.load.plan import Plan
from wcache.load.publish import (
    check_memory,
    device_facts,
    digested,
    made_slabs,
    publish_slabs,
    rank_memory,
)
from wcache.load.report import Conversation, ProgressReport, failure_told
from wcache.manifest import Manifest, Storage, Tensor
from wcache.memory.slab import Access, Memory, Slab
from wcache.paths import RankId, RankPaths
from wcache.protocol import AskLoad, LoadOrder, LoadSource, Message, NothingToLoad
from wcache.units import size

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)

CONNECT_S = 30.0
_CONNECT_PAUSE_S = 0.1
# The daemon checks every descriptor and waits for its supervisor to have stored them.
PUBLISH_S = 300.0


def run(rank_id: RankId) -> None:
    """Loads what the rank's daemon wants, if it wants anything.

    Raises :class:`wcache.errors.WcacheError`; the daemon was told of it then, where it could be.
    """
    with connect_when_up(RankPaths.of(rank_id)) as control:
        try:
            order = order_for_checkpoint(control)
            if order is None:
                return
            control.channel.settimeout(PUBLISH_S)
            with failure_told(control):
                load(control, order, rank_id)
        except (ConnectionError, TimeoutError) as error:
            raise TryAgainError(
                f"the daemon of rank {rank_id} went away during the load: {error}",
                hint="the load starts again when the daemon is back",
            ) from None


def connect_when_up(paths: RankPaths, *, timeout_s: float = CONNECT_S) -> Control:
    """Connects as a loader; waits for a daemon that is being started beside this process."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return Control.connect(paths, "loader")
        except NoSuchRankError:
            if time.monotonic() + _CONNECT_PAUSE_S > deadline:
                raise
        time.sleep(_CONNECT_PAUSE_S)


def ask_load(control: Conversation, source: LoadSource) -> LoadOrder | NothingToLoad:
    """What the daemon wants; raises what its refusal stands for."""
    reply = control.request(AskLoad(source=source), Message)
    if isinstance(reply, LoadOrder | NothingToLoad):
        return reply
    raise ProtocolError(f"answer is a {type(reply).__name__}, not a LoadOrder")


def order_for_checkpoint(control: Conversation) -> LoadOrder | None:
    """The daemon's order; None, after saying why, when there is nothing to do."""
    reply = ask_load(control, "checkpoint")
    if isinstance(reply, NothingToLoad):
        log.info("%s", reply.message)
        return None
    if reply.config.model.loader == "publish":
        log.info("nothing to load: the rank waits for the first engine to publish")
        return None
    return reply


def load(control: Conversation, order: LoadOrder, rank_id: RankId) -> int:
    """Reads the checkpoint and publishes it; returns the generation's number."""
    begun = time.monotonic()
    config, rank = order.config, rank_id.rank
    progress = ProgressReport(control)
    progress.begin("plan", 0)
    checkpoint = open_checkpoint(Path(config.model.path))
    identity = identify(checkpoint)
    check_content(config, checkpoint, identity)
    planned = plan(checkpoint, config, rank)
    memory = rank_memory(config, rank)
    sizes = check_memory(config, memory, rank, planned.total_bytes)
    log.info(
        "loading generation %d: %d tensors, %s of %s, from %s",
        order.generation, len(planned.targets), size(planned.weight_bytes),
        size(checkpoint.total_bytes), checkpoint.path,
    )  # fmt: skip
    progress.begin("allocate", sum(sizes))
    with made_slabs(memory, sizes, progress.advance) as slabs:
        storages = _fill(checkpoint, planned, memory, slabs, progress)
        progress.begin("publish", 0)
        manifest = Manifest(
            id=secrets.token_hex(16),
            fingerprint=fingerprint(config, rank, checkpoint, identity, device_facts(memory)),
            slabs=tuple(slab.info for slab in slabs),
            storages=storages,
            tensors=_tensors(planned),
            checkpoint=identity.shards,
        )
        generation = publish_slabs(control, memory, slabs, manifest)
    seconds = time.monotonic() - begun
    log.info(
        "published generation %d: %s in %.1f s", generation, size(planned.weight_bytes), seconds
    )
    return generation


def check_content(config: Config, checkpoint: Checkpoint, identity: Identity) -> None:
    """Raises :class:`CheckpointError` when this is another checkpoint than ``up`` recorded."""
    recorded = config.model.content
    if recorded is not None and recorded != identity.digest:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} is not the one that `wcache up` saw:"
            f" it is {identity.digest[:19]}, {recorded[:19]} was recorded",
            hint="run wcache up again to take the new one",
        )


def fingerprint(
    config: Config, rank: int, checkpoint: Checkpoint, identity: Identity, facts: dict[str, str]
) -> Fingerprint:
    """What this rank holds once ``checkpoint`` was loaded by ``config``.

    ``facts`` are those of :func:`wcache.load.publish.device_facts`.
    """
    quantization = checkpoint.config.quantization_config
    settings = None
    if quantization is not None:
        data = msgspec.json.encode(quantization, order="deterministic")
        settings = "sha256:" + hashlib.sha256(data).hexdigest()
    return held_from(
        config,
        rank,
        content=identity.digest,
        architecture=checkpoint.config.architecture,
        quantization=checkpoint.config.quantization_method,
        quantization_config=settings,
        **facts,
    )


def _fill(
    checkpoint: Checkpoint,
    planned: Plan,
    memory: Memory,
    slabs: "Sequence[Slab]",
    progress: ProgressReport,
) -> tuple[Storage, ...]:
    """Reads and digests; no mapping or tensor over the slabs is left, so that they can be sealed.

    torch is imported here at the earliest: a loader with nothing to load ends without it.
    """
    from wcache.load.read import read_plan

    mapping = memory.map(slabs, Access.WRITE)
    try:
        progress.begin("read", planned.weight_bytes)
        read_plan(checkpoint, planned, mapping, progress.advance)
        progress.begin("digest", planned.weight_bytes)
        return digested(mapping.tensor(), planned.spans, progress.advance)
    finally:
        mapping.close()


def _tensors(planned: Plan) -> tuple[Tensor, ...]:
    """The manifest's tensors.

    All are called parameters: a checkpoint does not tell them from buffers, the module that they
    are bound to does.
    """
    storage = {target.name: index for index, target in enumerate(planned.stored)}
    return tuple(
        Tensor(
            name=target.name,
            storage=storage[target.tied_to or target.name],
            dtype=target.dtype,
            shape=target.shape,
            stride=row_major(target.shape),
            tied_to=target.tied_to,
        )
        for target in planned.targets
    )


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor as torch counts them: an empty dimension counts
    as one of size 1."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))
