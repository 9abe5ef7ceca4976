"""One generation of a rank's weights: its descriptors, its manifest, and the checks of both."""

import logging
import os
import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from wcache import manifest as manifests
from wcache.config import Config
from wcache.daemon.handover import manifest_name, parse_manifest_name, parse_slab_name, slab_name
from wcache.errors import ManifestError, ProtocolError
from wcache.fingerprint import Fingerprint, compare
from wcache.manifest import MAX_MANIFEST_BYTES, SlabInfo
from wcache.memory.descriptor import check_descriptor
from wcache.memory.memfd import read_sealed
from wcache.protocol.messages import MAX_FDS_PER_TRANSFER
from wcache.protocol.reports import GenerationReport, GenerationRole, How
from wcache.protocol.wire import close_all
from wcache.units import size

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Generation:
    """Owns its descriptors until :meth:`close`.

    Of the manifest only the sums are kept in memory: decoded, that of 20,000 tensors would be most
    of what a daemon weighs, and nobody asks the daemon about a tensor.
    """

    number: int
    how: How
    fingerprint: Fingerprint
    weight_bytes: int
    storages: int
    tensors: int
    manifest_digest: str
    manifest_fd: int
    slab_fds: list[int]
    slabs: tuple[SlabInfo, ...]
    since: float = field(default_factory=time.time)

    @property
    def fds(self) -> list[int]:
        """The manifest's descriptor and then the slabs', as clients get them."""
        return [self.manifest_fd, *self.slab_fds]

    def named_fds(self) -> list[tuple[str, int]]:
        """What is stored, in the order in which it must be: the manifest last."""
        slabs = [(slab_name(self.number, index), fd) for index, fd in enumerate(self.slab_fds)]
        return [*slabs, (manifest_name(self.number), self.manifest_fd)]

    def close(self) -> None:
        close_all(self.fds)

    def in_words(self, leases: int | None = None) -> str:
        said = f"{self.number}: {size(self.weight_bytes)} in {self.tensors} tensors"
        if leases is None:
            return said
        return f"{said}, {leases} {'lease' if leases == 1 else 'leases'}"

    @property
    def slab_bytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)

    def report(self, role: GenerationRole, config: Config | None = None) -> GenerationReport:
        return GenerationReport(
            number=self.number,
            serving=role == "serving",
            role=role,
            config=config,
            how=self.how,
            manifest_digest=self.manifest_digest,
            fingerprint=self.fingerprint,
            fingerprint_digest=self.fingerprint.digest(),
            weight_bytes=self.weight_bytes,
            slab_bytes=self.slab_bytes,
            slabs=len(self.slabs),
            storages=self.storages,
            tensors=self.tensors,
            since=self.since,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """A generation that is kept and can not be read, perhaps another version's of wcache."""

    number: int
    manifest_digest: str
    problem: str
    stored: tuple[tuple[str, int], ...]

    @property
    def fds(self) -> list[int]:
        return [fd for _, fd in self.stored]

    def named_fds(self) -> list[tuple[str, int]]:
        """What is stored, in the order in which it must be: the manifest last."""
        return list(self.stored)


def accept(number: int, how: How, fds: Sequence[int], announced: Sequence[SlabInfo]) -> Generation:
    """Takes what a loader published: the manifest's descriptor and then the slabs'.

    Raises :class:`ManifestError` or :class:`ProtocolError`, and then owns nothing.
    """
    if not announced or len(fds) != 1 + len(announced):
        raise ProtocolError(f"{len(fds)} descriptors for a manifest and {len(announced)} slabs")
    data = read_sealed(fds[0], MAX_MANIFEST_BYTES)
    manifest = manifests.decode(data)
    for index, (fd, slab) in enumerate(zip(fds[1:], announced, strict=True)):
        try:
            check_descriptor(fd, slab)
        except ProtocolError as error:
            raise ProtocolError(f"slab {index}: {error.message}") from None
    _check_slabs_are_distinct(fds[1:])
    if manifest.slabs != tuple(announced):
        raise ManifestError("manifest names other slabs than those that came")
    manifests.check(manifest, range_bytes=sum(slab.nbytes for slab in announced))
    return Generation(
        number=number,
        how=how,
        fingerprint=manifest.fingerprint,
        weight_bytes=manifest.weight_bytes,
        storages=len(manifest.storages),
        tensors=len(manifest.tensors),
        manifest_digest=manifests.digest(data),
        manifest_fd=fds[0],
        slab_fds=list(fds[1:]),
        slabs=tuple(announced),
    )


def check_is_wanted(held: Generation, wanted: Fingerprint | None) -> None:
    """Raises :class:`ManifestError` for weights that the configuration does not ask for."""
    found = compare(held.fingerprint, wanted) if wanted is not None else ()
    if found:
        raise ManifestError(
            "published weights are not the wanted ones: " + "; ".join(map(str, found))
        )
    slab, device = held.slabs[0], wanted and wanted.device
    if (slab.kind == "cuda") != (device == "cuda"):
        raise ManifestError(f"published slabs are {slab.kind} memory, wanted is {device}")


def adopt(
    handed_over: dict[str, int],
) -> tuple[list[Generation], list[str], list[Unread]]:
    """Sorts what the supervisor kept into whole generations, by rising number.

    Also returns the names of what belongs to none, closed already, for removal from the store; and
    the generations that can not be read. One of these may be whole, and of another version of
    wcache: it stays in the store, with its memory, until somebody decides.
    """
    slab_fds: dict[int, dict[int, int]] = {}
    manifest_fds: dict[int, int] = {}
    for name, fd in handed_over.items():
        if (slab := parse_slab_name(name)) is not None:
            slab_fds.setdefault(slab[0], {})[slab[1]] = fd
        elif (number := parse_manifest_name(name)) is not None:
            manifest_fds[number] = fd
    whole: list[Generation] = []
    unread: list[Unread] = []
    for number, manifest_fd in sorted(manifest_fds.items()):
        slabs = slab_fds.get(number, {})
        try:
            whole.append(_adopt_one(number, manifest_fd, slabs))
        except ProtocolError as error:
            log.error("generation %d can not be adopted: %s", number, error.message)
        except ManifestError as error:
            stored = [(slab_name(number, index), fd) for index, fd in sorted(slabs.items())]
            one = Unread(
                number=number,
                manifest_digest=manifests.digest(read_sealed(manifest_fd, MAX_MANIFEST_BYTES)),
                problem=f"generation {number} is kept and can not be read: {error.message};"
                " wcache down frees it, the wcache that loaded it can serve it",
                stored=(*stored, (manifest_name(number), manifest_fd)),
            )
            unread.append(one)
            log.error("%s", one.problem)
    whole_or_not: list[Generation | Unread] = [*whole, *unread]
    kept = {name for one in whole_or_not for name, _ in one.named_fds()}
    dropped = [name for name in handed_over if name not in kept]
    close_all([handed_over[name] for name in dropped])
    return whole, dropped, unread


def _adopt_one(number: int, manifest_fd: int, by_index: dict[int, int]) -> Generation:
    announced = manifests.decode(read_sealed(manifest_fd, MAX_MANIFEST_BYTES)).slabs
    if len(announced) >= MAX_FDS_PER_TRANSFER:
        raise ManifestError(f"manifest names {len(announced)} slabs")
    if missing := [index for index in range(len(announced)) if index not in by_index]:
        raise ProtocolError(
            f"slab {missing[0]} of {len(announced)} was not handed over"
            " (is the supervisor's store too small?)"
        )
    return accept(
        number, "adopted", [manifest_fd, *(by_index[i] for i in range(len(announced)))], announced
    )


def _check_slabs_are_distinct(fds: Iterable[int]) -> None:
    """The same memfd given twice would make two storages share bytes unseen.

    Character devices are passed over: every GPU allocation shows the same node.
    """
    seen: set[tuple[int, int]] = set()
    for index, fd in enumerate(fds):
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            continue
        if (status.st_dev, status.st_ino) in seen:
            raise ProtocolError(f"slab {index} was given before")
        seen.add((status.st_dev, status.st_ino))
