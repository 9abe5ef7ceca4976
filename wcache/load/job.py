"""One load from its order to its publication: what ``python -m wcache.load RANK`` does."""

import logging
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from wcache import fp8, gate
from wcache.checkpoint import Checkpoint, Identity, IdentityCache, open_checkpoint
from wcache.config import Config
from wcache.errors import CheckpointError, NoSuchRankError, TryAgainError, WcacheError
from wcache.fingerprint import Fingerprint, digest_of, held_from
from wcache.load.architectures import Architectures
from wcache.load.order import PUBLISH_S, ask_load, check_content
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
from wcache.load.report import Conversation, Inquiry, ProgressReport, failure_told
from wcache.manifest import Manifest, Storage, Tensor
from wcache.memory.slab import Access, Memory, Slab
from wcache.paths import InstancePaths, RankId, RankPaths
from wcache.protocol.control import Control
from wcache.protocol.messages import (
    LoadOrder,
    NothingToLoad,
)
from wcache.units import size

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

log = logging.getLogger(__name__)

CONNECT_S = 30.0
_CONNECT_PAUSE_S = 0.1


def run(rank_id: RankId) -> None:
    """Loads what the rank's daemon wants, if it wants anything.

    Raises :class:`wcache.errors.WcacheError`; the daemon was told of it then, where it could be.
    """
    with connect_when_up(RankPaths.of(rank_id)) as control:
        try:
            control.channel.settimeout(PUBLISH_S)
            order = order_for_checkpoint(control)
            if order is None:
                return
            with failure_told(control):
                check_temporary_folder()
                if order.config.model.loader == "vllm":
                    from wcache.engines.vllm.alone import load as load_with_vllm

                    load_with_vllm(control, order, rank_id)
                else:
                    load(control, order, rank_id)
        except (ConnectionError, TimeoutError) as error:
            raise TryAgainError(
                f"the daemon of rank {rank_id} went away during the load: {error}",
                hint="the load starts again when the daemon is back",
            ) from None


def check_temporary_folder() -> None:
    """torch and engines want one that has room; raises :class:`WcacheError` where there is none."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        folder = os.environ.get("TMPDIR") or "/tmp"
        raise WcacheError(
            f"no temporary file can be written to {folder}",
            hint=f"df {folder} shows it: make room there, then: wcache up",
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


def order_for_checkpoint(control: Inquiry) -> LoadOrder | None:
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
    gate.check(checkpoint)  # before identify, which reads samples of the weights
    # wcache up has just found both out, most of the time.
    paths = InstancePaths.of(rank_id.instance)
    identity = IdentityCache(paths.identity_folder, keep=False).identify(checkpoint)
    check_content(config, checkpoint, identity)
    architectures = Architectures(paths.architecture_folder, keep=False)
    planned = plan(checkpoint, config, rank, architectures)
    memory = rank_memory(config, rank)
    sizes = check_memory(config, memory, rank, planned.total_bytes)
    log.info(
        "loading generation %d: %d tensors, %s, from %s in %s",
        order.generation, len(planned.targets), size(planned.weight_bytes),
        size(checkpoint.total_bytes), checkpoint.path,
    )  # fmt: skip
    if config.model.quantization == "fp8":
        _log_quantized(planned)
    progress.begin("allocate", sum(sizes))
    with made_slabs(memory, sizes, progress.advance) as slabs:
        storages = _fill(checkpoint, planned, config, memory, slabs, progress)
        progress.begin("publish", 0)
        manifest = Manifest(
            id=secrets.token_hex(16),
            fingerprint=fingerprint(config, rank, checkpoint, identity, device_facts(memory)),
            slabs=tuple(slab.info for slab in slabs),
            storages=storages,
            tensors=described(planned),
            checkpoint=identity.shards,
        )
        generation = publish_slabs(control, memory, slabs, manifest)
    seconds = time.monotonic() - begun
    log.info(
        "published generation %d: %s in %.1f s", generation, size(planned.weight_bytes), seconds
    )
    return generation


def _log_quantized(planned: Plan) -> None:
    made = sum(target.scale is not None for target in planned.targets)
    read = sum(target.source.dtype == fp8.WEIGHT_DTYPE for target in planned.targets)
    if made or read:
        log.info("quantizing %d weights to FP8; %d are FP8 in the checkpoint", made, read)
    else:
        log.warning(
            "--quantization fp8 changes nothing: no linear layer of this rank has dimensions that"
            " are multiples of %d",
            fp8.BLOCK,
        )


def fingerprint(
    config: Config, rank: int, checkpoint: Checkpoint, identity: Identity, facts: dict[str, str]
) -> Fingerprint:
    """What this rank holds once ``checkpoint`` was loaded by ``config``.

    ``facts`` are those of :func:`wcache.load.publish.device_facts`.
    """
    found = gate.check(checkpoint)
    settings = found.settings
    if found.method == "none" and config.model.quantization == "fp8":
        found, settings = gate.Quantization("fp8"), fp8.ON_LOAD
    return held_from(
        config,
        rank,
        content=identity.digest,
        architecture=checkpoint.config.architecture,
        quantization=found.method,
        quantization_config=digest_of(settings) if settings is not None else None,
        **facts,
    )


def _fill(
    checkpoint: Checkpoint,
    planned: Plan,
    config: Config,
    memory: Memory,
    slabs: "Sequence[Slab]",
    progress: ProgressReport,
) -> tuple[Storage, ...]:
    """Reads, and digests what was not digested on its way.

    No mapping or tensor over the slabs is left, so that they can be sealed. torch is imported here
    at the earliest: a loader with nothing to load ends without it.
    """
    from wcache.load.read import read_plan
    from wcache.memory.room import gpu_room

    mapping = memory.map(slabs, Access.WRITE)
    try:
        with gpu_room("nvidia-smi shows who uses it; wcache up tries again"):
            progress.begin("read", planned.weight_bytes)
            found = read_plan(
                checkpoint, planned, mapping, progress.advance, shared=config.ranks.dp > 1
            )
            check_scales(planned, mapping.tensor())
            rest = [span for span in planned.spans if span not in found]
            if rest:
                progress.begin("digest", sum(nbytes for _, nbytes in rest))
                storages = digested(mapping.tensor(), rest, progress.advance)
                found |= {(one.offset, one.nbytes): one.digest for one in storages}
        return tuple(Storage(*span, found[span]) for span in planned.spans)
    finally:
        mapping.close()


def check_scales(planned: Plan, content: "torch.Tensor") -> None:
    """Looks whether every weight that was quantized consisted of numbers.

    ``content``, uint8[total_bytes], is the rank's memory after reading. A block with a value that
    is not finite has a scale that is not finite. Raises :class:`CheckpointError` with the names.
    """
    import torch

    made = [target for target in planned.stored if target.scale is not None]
    if not made:
        return
    finite = [
        content[scale.offset : scale.offset + scale.nbytes].view(torch.float32).isfinite().all()
        for target in made
        if (scale := target.scale) is not None
    ]
    # One answer of the device for all of them.
    bad = [
        one.name for one, good in zip(made, torch.stack(finite).tolist(), strict=True) if not good
    ]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise CheckpointError(
            f"weight {bad[0]!r}{more} has values that are not finite, and can not be quantized",
            hint="the checkpoint is damaged, or load it without --quantization fp8",
        )


def described(planned: Plan) -> tuple[Tensor, ...]:
    """The manifest's tensors.

    All are called parameters: a checkpoint does not tell them from buffers, the module that they
    are bound to does.
    """
    tensors: list[Tensor] = []
    storages: dict[str, int] = {}
    count = 0
    for target in planned.targets:
        if target.tied_to is None:
            storages[target.name] = count
            count += 1
        index = storages[target.tied_to or target.name]
        stride = row_major(target.shape)
        tensors.append(
            Tensor(
                name=target.name, storage=index, dtype=target.dtype, shape=target.shape,
                stride=stride, tied_to=target.tied_to,
            )
        )  # fmt: skip
        if (scale := target.scale) is not None:
            # As Plan.spans has them: behind its weight.
            stride = row_major(scale.shape)
            tensors.append(
                Tensor(
                    name=scale.name, storage=count, dtype=fp8.SCALE_DTYPE, shape=scale.shape,
                    stride=stride,
                )
            )  # fmt: skip
            count += 1
    return tuple(tensors)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor as torch counts them: an empty dimension counts
    as one of size 1."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))
