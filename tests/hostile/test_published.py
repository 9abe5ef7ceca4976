"""Weights that must not be taken: damaged manifests, and descriptors that are not what was said."""

import fcntl
import os
from collections.abc import Callable

import msgspec
import pytest

from tests.daemons import Start, report
from tests.places import Places, publish_config
from tests.processes import open_files, settled_files, wait_for
from tests.publishing import SLAB_BYTES, content, manifest, slab
from wcache import manifest as manifests
from wcache.errors import ManifestError, WcacheError
from wcache.manifest import Manifest, SlabInfo, Storage, Tensor
from wcache.memory.memfd import create_sealed
from wcache.protocol.control import Control
from wcache.protocol.messages import AskLoad, LoadOrder, Publish, Published
from wcache.protocol.wire import close_all
from wcache.state import RankState

pytestmark = pytest.mark.hostile

replace = msgspec.structs.replace


def with_storage(**changes: object) -> Manifest:
    good = manifest()
    return replace(good, storages=(replace(good.storages[0], **changes),))


def with_tensor(**changes: object) -> Manifest:
    good = manifest()
    return replace(good, tensors=(replace(good.tensors[0], **changes),))


def overlapping() -> Manifest:
    good = manifest()
    second = Storage(offset=256, nbytes=10, digest="test:00")
    return replace(good, storages=(*good.storages, second))


# Rows are wider than a line: a case reads best in one piece.
# ruff: noqa: E501
DAMAGED: list[tuple[str, Callable[[], Manifest], str]] = [
    ("negative offset", lambda: with_storage(offset=-256), "storage 0 has a negative size or offset"),
    ("negative size", lambda: with_storage(nbytes=-1), "storage 0 has a negative size or offset"),
    ("unaligned", lambda: with_storage(offset=8), "storage 0 begins at byte 8, which is no multiple of 256"),
    ("past the end", lambda: with_storage(offset=SLAB_BYTES), f"storage 0 ends at byte {SLAB_BYTES + 4096} of slabs with {SLAB_BYTES}"),
    ("enormous", lambda: with_storage(nbytes=1 << 62), "storage 0 ends at byte"),
    ("overlap", overlapping, "storages 0 and 1 overlap"),
    ("no digest", lambda: with_storage(digest="none"), "storage 0 has no digest"),
    ("no such storage", lambda: with_tensor(storage=1), "tensor 't0' is in storage 1, which is not there"),
    ("negative storage", lambda: with_tensor(storage=-1), "tensor 't0' is in storage -1, which is not there"),
    ("dtype", lambda: with_tensor(dtype="F128"), "tensor 't0' has the unknown dtype 'F128'"),
    ("too long", lambda: with_tensor(shape=(4097,)), "tensor 't0' reaches past the 4096 bytes of its storage"),
    ("offset past the end", lambda: with_tensor(storage_offset=1), "tensor 't0' reaches past the 4096 bytes"),
    ("stride past the end", lambda: with_tensor(shape=(2,), stride=(4096,)), "tensor 't0' reaches past the 4096 bytes"),
    ("product that would wrap", lambda: with_tensor(shape=(1 << 33, 1 << 33), stride=(1 << 33, 1)), "tensor 't0' reaches past"),
    ("negative stride", lambda: with_tensor(stride=(-1,)), "tensor 't0' has a negative size, stride or offset"),
    ("negative shape", lambda: with_tensor(shape=(-1,)), "tensor 't0' has a negative size, stride or offset"),
    ("stride missing", lambda: with_tensor(stride=()), "tensor 't0' has 1 sizes and 0 strides"),
    ("too many dimensions", lambda: with_tensor(shape=(1,) * 65, stride=(1,) * 65), "tensor 't0' has 65 sizes and 65 strides"),
    ("no name", lambda: with_tensor(name=""), "tensor name of 0 characters"),
    ("long name", lambda: with_tensor(name="x" * 2000), "tensor name of 2000 characters"),
    ("twice", lambda: replace(manifest(), tensors=manifest().tensors * 2), "tensor 't0' is there twice"),
    ("tied to nothing", lambda: with_tensor(tied_to="t9"), "tensor 't0' is tied to 't9', which is no tensor of the same storage"),
    ("tied to itself", lambda: with_tensor(tied_to="t0"), "tensor 't0' is tied to 't0'"),
    ("no id", lambda: replace(manifest(), id=""), "manifest has no id of 32 hexadecimal digits"),
    ("two kinds", lambda: replace(manifest(2), slabs=(manifest().slabs[0], SlabInfo(kind="cuda", nbytes=SLAB_BYTES))), "slabs are not all of one kind"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "said"), [case[1:] for case in DAMAGED], ids=[c[0] for c in DAMAGED]
)
def test_damaged_manifest_is_refused(make: Callable[[], Manifest], said: str) -> None:
    damaged = make()
    total = sum(info.nbytes for info in damaged.slabs)
    with pytest.raises(ManifestError) as caught:
        manifests.check(manifests.decode(manifests.encode(damaged)), range_bytes=total)
    assert caught.value.message.startswith(said)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "manifest can not be read"),
        (b"{}", "manifest can not be read"),
        (b"\x80\x04K\x01.", "manifest can not be read"),
        (b'{"version": 2}', "manifest has version 2, this wcache reads 1"),
        (b'{"version": 1, "id": 5}', "manifest can not be read"),
        (b"[" * 100000, "manifest can not be read"),
    ],
    ids=["empty", "no fields", "a pickle", "other version", "wrong type", "deep"],
)
def test_what_is_no_manifest_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(ManifestError) as caught:
        manifests.decode(data)
    assert caught.value.message.startswith(said)


def test_good_manifest_with_awkward_tensors_is_taken() -> None:
    good = manifest()
    views = (
        Tensor(name="empty", storage=0, dtype="F32", shape=(0, 5), stride=(5, 1)),
        Tensor(name="scalar", storage=0, dtype="F64", shape=(), stride=()),
        Tensor(name="transposed", storage=0, dtype="BF16", shape=(32, 64), stride=(1, 32)),
        Tensor(name="broadcast", storage=0, dtype="F32", shape=(9, 9), stride=(0, 0), storage_offset=1023),
        Tensor(name="tied", storage=0, dtype="U8", shape=(4096,), stride=(1,), tied_to="t0"),
    )  # fmt: skip
    described = replace(good, tensors=(*good.tensors, *views))
    manifests.check(manifests.decode(manifests.encode(described)), range_bytes=SLAB_BYTES)


# --- descriptors, offered to a real daemon -------------------------------------------------------


def ordinary_file(places: Places) -> int:
    path = places.root / "slab"
    path.write_bytes(bytes(SLAB_BYTES))
    return os.open(path, os.O_RDWR)


def unsealed(_: Places) -> int:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.truncate(fd, SLAB_BYTES)
    return fd


def sealed_but_writable(places: Places) -> int:
    fd = unsealed(places)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def device(_: Places) -> int:
    return os.open("/dev/zero", os.O_RDONLY)


def pipe(_: Places) -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


BAD_SLABS: list[Callable[[Places], int]] = [
    ordinary_file,
    unsealed,
    sealed_but_writable,
    device,
    pipe,
    lambda _: slab(b"", SLAB_BYTES - 4096),
    lambda _: slab(b"", SLAB_BYTES + 4096),
]


@pytest.mark.parametrize("make", BAD_SLABS, ids=[
    "file", "unsealed", "writable", "device", "pipe", "short", "long",
])  # fmt: skip
def test_descriptor_that_is_no_sealed_slab_is_refused(
    places: Places, start: Start, make: Callable[[Places], int]
) -> None:
    places.write_config(publish_config())
    start()
    fd = make(places)
    said = offer(places, manifest(), [fd])
    assert said.startswith("slab 0: "), said
    assert report(places).state is RankState.EMPTY


def test_same_memfd_twice_is_refused(places: Places, start: Start) -> None:
    places.write_config(publish_config())
    start()
    fd = slab(content(b"a"))
    assert offer(places, manifest(2), [fd, os.dup(fd)]) == "slab 1 was given before"


def test_fewer_descriptors_than_slabs_are_refused(places: Places, start: Start) -> None:
    places.write_config(publish_config())
    start()
    assert offer(places, manifest(2), [slab(content(b"a"))]).startswith(
        "2 descriptors for a manifest and 2"
    )


def test_unsealed_manifest_is_refused(places: Places, start: Start) -> None:
    places.write_config(publish_config())
    start()
    fd = os.memfd_create("manifest", os.MFD_ALLOW_SEALING)
    os.write(fd, manifests.encode(manifest()))
    assert "seal" in offer(places, manifest(), [slab(content(b"a"))], manifest_fd=fd)


def test_manifest_that_names_other_slabs_is_refused(places: Places, start: Start) -> None:
    places.write_config(publish_config())
    start()
    fd = create_sealed("manifest", manifests.encode(manifest(2)))
    said = offer(places, manifest(1), [slab(content(b"a"))], manifest_fd=fd)
    assert said == "manifest names other slabs than those that came"


def test_host_memory_can_not_pass_for_a_gpus(places: Places, start: Start) -> None:
    places.write_config(publish_config())
    start()
    false = replace(
        manifest(), slabs=(SlabInfo(kind="cuda", nbytes=SLAB_BYTES, device_uuid="GPU-x"),)
    )
    assert offer(places, false, [slab(content(b"a"))]).startswith("slab 0: ")


def test_refused_weights_cost_no_descriptor(places: Places, start: Start) -> None:
    places.write_config(publish_config())
    daemon = start()
    before = settled_files(daemon.pid)
    for _ in range(20):
        offer(places, with_storage(offset=8), [slab(content(b"a"))])
    report(places)
    wait_for(lambda: open_files(daemon.pid) == before, "what was refused is closed")


def offer(
    places: Places, described: Manifest, slabs: list[int], manifest_fd: int | None = None
) -> str:
    """Publishes with ``slabs``, which it closes; what the daemon said of it."""
    fd = (
        create_sealed("manifest", manifests.encode(described))
        if manifest_fd is None
        else manifest_fd
    )
    fds = [fd, *slabs]
    try:
        with Control.connect(places.rank(), "loader") as control:
            control.request(AskLoad(source="engine"), LoadOrder)
            with pytest.raises(WcacheError) as caught:
                control.request(Publish(slabs=described.slabs), Published, fds)
            return caught.value.message
    finally:
        close_all(fds)
