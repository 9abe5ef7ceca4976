"""What a loader would publish, made by hand: nearly empty slabs and their manifest."""

import hashlib
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from wcache import manifest as manifests
from wcache.fingerprint import Fingerprint
from wcache.manifest import Manifest, SlabInfo, Storage, Tensor
from wcache.memory.memfd import create_sealed
from wcache.paths import RankPaths
from wcache.protocol.control import Channel, Control, connect_socket
from wcache.protocol.messages import AskLoad, LoadOrder, Publish, Published
from wcache.protocol.wire import close_all

SLAB_BYTES = 2 << 20
FINGERPRINT = Fingerprint(model="test-model", loader="publish", device="cpu")


def content(seed: bytes, nbytes: int = 4096) -> bytes:
    """Bytes that are told apart by ``seed``."""
    return hashlib.shake_128(seed).digest(nbytes)


def manifest(
    slabs: int = 1, *, fingerprint: Fingerprint = FINGERPRINT, nbytes: int = 4096
) -> Manifest:
    """One storage at the start of each slab and one U8 tensor over all of it."""
    return Manifest(
        id=uuid.uuid4().hex,
        fingerprint=fingerprint,
        slabs=tuple(SlabInfo(kind="host", nbytes=SLAB_BYTES) for _ in range(slabs)),
        storages=tuple(
            Storage(offset=index * SLAB_BYTES, nbytes=nbytes, digest="test:00")
            for index in range(slabs)
        ),
        tensors=tuple(
            Tensor(name=f"t{index}", storage=index, dtype="U8", shape=(nbytes,), stride=(1,))
            for index in range(slabs)
        ),
    )


def slab(data: bytes, nbytes: int = SLAB_BYTES) -> int:
    """A sealed memfd of ``nbytes`` that begins with ``data``; the caller owns it."""
    return create_sealed("test-slab", data + bytes(nbytes - len(data)))


@contextmanager
def offered(described: Manifest, slabs: list[bytes]) -> Iterator[list[int]]:
    """The descriptors to publish: the manifest's and a slab for each of ``slabs``."""
    fds = [create_sealed("test-manifest", manifests.encode(described)), *map(slab, slabs)]
    try:
        yield fds
    finally:
        close_all(fds)


def publish(paths: RankPaths, slabs: list[bytes]) -> Manifest:
    """Publishes one tensor for each of ``slabs`` to the daemon of ``paths``."""
    described = manifest(len(slabs))
    with Control.connect(paths, "loader") as control, offered(described, slabs) as fds:
        control.request(AskLoad(source="engine"), LoadOrder)
        control.request(Publish(slabs=described.slabs), Published, fds)
    return described


def raw_channel(paths: RankPaths) -> tuple[socket.socket, Channel]:
    """A connection that has not greeted, for peers that misbehave."""
    connection = connect_socket(paths.socket, "the rank", 20)
    return connection, Channel(connection)


def head(fd: int, nbytes: int = 4096) -> bytes:
    return os.pread(fd, nbytes, 0)
