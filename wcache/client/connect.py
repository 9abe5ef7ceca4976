"""Attaching: asks a rank's daemon for its descriptors, checks them, and maps them."""

import time

from wcache import manifest as manifests
from wcache.client.attachment import Attachment
from wcache.client.collector import collector_paused
from wcache.client.descriptors import MappedDescriptors
from wcache.client.lease import FIRST_PAUSE_S, LONGEST_PAUSE_S, Lease
from wcache.difference import Difference
from wcache.errors import (
    ManifestError,
    MismatchError,
    NoSuchRankError,
    NotReadyError,
    TryAgainError,
    UsageError,
    WcacheError,
)
from wcache.fingerprint import Fingerprint, compare
from wcache.manifest import MAX_MANIFEST_BYTES, Manifest
from wcache.memory import open_memory
from wcache.memory.descriptor import check_descriptor
from wcache.memory.memfd import read_sealed
from wcache.memory.slab import Access, Mapping, Slab
from wcache.paths import RankId, RankPaths, rank_meant
from wcache.protocol.control import (
    COMES_BACK_S,
    DEFAULT_TIMEOUT_S,
    Control,
    EndedDaemonError,
    SilentDaemonError,
)
from wcache.protocol.messages import Attach, Attached, Refused
from wcache.protocol.wire import close_all

_DIFFERENCES_TOLD = 5


def attach(
    *,
    rank: int | None = None,
    instance: str | None = None,
    wanted: Fingerprint | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    wait_s: float = 0.0,
    comes_back_s: float = COMES_BACK_S,
    access: Access = Access.READ,
) -> Attachment:
    """Maps the weights of a rank and takes a lease on them.

    ``rank`` and ``instance`` default to WCACHE_RANK and WCACHE_INSTANCE, then to rank 0 of the
    default instance. ``timeout_s`` bounds each wait for a daemon that does not answer; ``wait_s``
    is how long to go on asking while the rank is not up or not ready; a daemon that ends while it
    is asked, or that was there before, is given ``comes_back_s`` in any case. ``access`` is
    :attr:`Access.READ`, or :attr:`Access.PRIVATE` for host memory that an engine writes to.

    Raises :class:`MismatchError` with every field of ``wanted`` that the held weights do not meet,
    :class:`NotReadyError`, :class:`NoSuchRankError`, :class:`NoPermissionError`, and other
    :class:`wcache.errors.WcacheError` when what came can not be mapped.
    """
    if access is Access.WRITE:
        raise UsageError("weights that are served can not be mapped for writing")
    paths = RankPaths.of(rank_meant(rank, instance))
    deadline = time.monotonic() + wait_s
    pause = FIRST_PAUSE_S
    has_ended = False
    while True:
        try:
            return _attach(paths, wanted, timeout_s, access)
        except (NotReadyError, NoSuchRankError, TryAgainError) as error:
            if not has_ended and _may_come_back(paths, error):
                has_ended = True
                deadline = max(deadline, time.monotonic() + comes_back_s)
            left = deadline - time.monotonic()
            if left <= 0:
                raise
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE_S)


def _may_come_back(paths: RankPaths, error: WcacheError) -> bool:
    """Whether a daemon has ended and another may be on its way.

    Of one that was asked to end nobody here knows whether for a restart: it has served, and no boot
    was since then.
    """
    if isinstance(error, (EndedDaemonError, TryAgainError)):
        return True
    is_silent = isinstance(error, SilentDaemonError)
    return isinstance(error, NoSuchRankError) and not is_silent and paths.served_file.exists()


def _attach(
    paths: RankPaths, wanted: Fingerprint | None, timeout_s: float, access: Access
) -> Attachment:
    begun = time.perf_counter()
    control = Control.connect(paths, "client", timeout_s=timeout_s)
    try:
        attached, fds = _ask(control, paths.id, wanted)
        fetched = time.perf_counter()
        with collector_paused():
            attachment = _mapped(paths, control, attached, fds, wanted, access)
        attachment.seconds = {"fetch": fetched - begun, "map": time.perf_counter() - fetched}
        return attachment
    except BaseException:
        control.close()
        raise


def _mapped(
    paths: RankPaths,
    control: Control,
    attached: Attached,
    fds: list[int],
    wanted: Fingerprint | None,
    access: Access,
) -> Attachment:
    """Owns ``fds``: the attachment keeps them, and closes them with its lease."""
    try:
        manifest, mapping = _receive(attached, fds, access)
    except BaseException:
        close_all(fds)
        raise
    descriptors = MappedDescriptors(fds, attached.slabs)
    try:
        if wanted is not None and (found := compare(manifest.fingerprint, wanted)):
            raise _mismatch(paths.id, found)
        digest, generation = attached.manifest_digest, attached.generation
        return Attachment(
            rank_id=paths.id,
            generation=generation,
            manifest=manifest,
            mapping=mapping,
            lease=lambda: Lease(paths, control, digest, descriptors),
        )
    except BaseException:
        descriptors.close()
        mapping.close()
        raise


def _ask(control: Control, rank: RankId, wanted: Fingerprint | None) -> tuple[Attached, list[int]]:
    """The daemon's answer and its descriptors, which the caller owns."""
    try:
        attached = control.request(Attach(wanted=wanted), Attached)
    except MismatchError as error:
        refusal = getattr(error, "refusal", None)
        if isinstance(refusal, Refused) and refusal.differences:
            raise _mismatch(rank, refusal.differences, refusal.hint) from None
        raise
    except TimeoutError:
        raise SilentDaemonError(f"daemon of rank {rank} does not answer") from None
    except OSError as error:
        raise TryAgainError(
            f"daemon of rank {rank} ended while it was asked: {error}",
            hint="it keeps the weights and comes back: try again",
        ) from None
    return attached, control.channel.take_fds(1 + len(attached.slabs))


def _mismatch(rank: RankId, found: tuple[Difference, ...], hint: str = "") -> MismatchError:
    told = "; ".join(map(str, found[:_DIFFERENCES_TOLD]))
    if len(found) > _DIFFERENCES_TOLD:
        # The daemon's log has a line for every engine that it refuses.
        told += f"; and {len(found) - _DIFFERENCES_TOLD} more: wcache logs {rank} shows all"
    return MismatchError(f"rank {rank} holds other weights: {told}", differences=found, hint=hint)


def _receive(attached: Attached, fds: list[int], access: Access) -> tuple[Manifest, Mapping]:
    """Checks and maps what came; ``fds`` stay the caller's."""
    data = read_sealed(fds[0], MAX_MANIFEST_BYTES)
    digest = manifests.digest(data)
    if digest != attached.manifest_digest:
        raise ManifestError(f"manifest has digest {digest}, not {attached.manifest_digest}")
    manifest = manifests.decode(data)
    if not manifest.slabs or manifest.slabs != attached.slabs:
        raise ManifestError("manifest is of other slabs than those that came with it")
    _check_range(manifest)
    slabs = [Slab(fd, info) for fd, info in zip(fds[1:], manifest.slabs, strict=True)]
    for slab in slabs:
        check_descriptor(slab.fd, slab.info)
    first = manifest.slabs[0]
    memory = open_memory("cuda" if first.kind == "cuda" else "cpu", device_uuid=first.device_uuid)
    return manifest, memory.map(slabs, access)


def _check_range(manifest: Manifest) -> None:
    """Raises :class:`ManifestError` for a storage outside of the slabs.

    The daemon has checked all of a manifest with this digest when it was published; for 20,000
    tensors that takes as long as making them does.
    """
    nbytes = sum(slab.nbytes for slab in manifest.slabs)
    last = max((storage.offset + storage.nbytes for storage in manifest.storages), default=0)
    if last > nbytes:
        raise ManifestError(f"manifest ends at byte {last} of slabs with {nbytes}")
