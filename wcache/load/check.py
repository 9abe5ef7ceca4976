"""Whether bytes that an engine has given back are those that were published: digest by digest."""

from wcache import manifest as manifests
from wcache.errors import ManifestError, WcacheError
from wcache.load.publish import digested
from wcache.load.report import ProgressReport
from wcache.manifest import MAX_MANIFEST_BYTES, Manifest
from wcache.memory import open_memory
from wcache.memory.descriptor import check_descriptor
from wcache.memory.memfd import read_sealed
from wcache.memory.slab import Access, Slab
from wcache.protocol.messages import CheckOrder
from wcache.units import size

_MAX_NAMED = 5


def problem_of(order: CheckOrder, fds: list[int], progress: ProgressReport) -> str:
    """Why the slabs of ``fds[1:]`` are not what the manifest in ``fds[0]`` says; empty if they are.

    The digests are computed where the memory is, through a read-only map. ``fds`` stay the
    caller's. What can not be read or mapped is not the right bytes either.
    """
    try:
        manifest = _manifest(order, fds[0])
        progress.begin("check", manifest.weight_bytes)
        return _differing(manifest, fds[1:], progress)
    except WcacheError as error:
        return error.message


def _manifest(order: CheckOrder, fd: int) -> Manifest:
    data = read_sealed(fd, MAX_MANIFEST_BYTES)
    if manifests.digest(data) != order.manifest_digest:
        raise ManifestError("its manifest is not the one that the daemon has accepted")
    manifest = manifests.decode(data)
    if manifest.slabs != order.slabs:
        raise ManifestError("its manifest names other slabs than those that came")
    manifests.check(manifest, range_bytes=sum(slab.nbytes for slab in manifest.slabs))
    return manifest


def _differing(manifest: Manifest, fds: list[int], progress: ProgressReport) -> str:
    slabs = [Slab(fd, info) for fd, info in zip(fds, manifest.slabs, strict=True)]
    for slab in slabs:
        check_descriptor(slab.fd, slab.info)
    first = manifest.slabs[0]
    memory = open_memory("cuda" if first.kind == "cuda" else "cpu", device_uuid=first.device_uuid)
    mapping = memory.map(slabs, Access.READ)
    try:
        spans = [(storage.offset, storage.nbytes) for storage in manifest.storages]
        found = digested(mapping.tensor(), spans, progress.advance)
    finally:
        mapping.close()
    bad = [
        index
        for index, (now, then) in enumerate(zip(found, manifest.storages, strict=True))
        if now.digest != then.digest
    ]
    if not bad:
        return ""
    nbytes = sum(manifest.storages[index].nbytes for index in bad)
    return (
        f"{len(bad)} of {len(manifest.storages)} storages, {size(nbytes)}, are not the bytes that"
        f" were published: {_named(manifest, bad)}"
    )


def _named(manifest: Manifest, storages: list[int]) -> str:
    """The tensors in ``storages`` by name, the first few."""
    chosen = set(storages)
    names = [tensor.name for tensor in manifest.tensors if tensor.storage in chosen]
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(name[:100] for name in names[:_MAX_NAMED]) + more
