"""Weights whose digests are right, a daemon that has lost them, and who gives them back."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import torch

from tests.daemons import Daemon, Start, connects
from tests.places import Places
from tests.processes import Store, end, wait_for
from tests.publishing import content, manifest, slab
from wcache import manifest as manifests
from wcache.load.order import ask_load
from wcache.manifest import Manifest
from wcache.memory.digest import digest
from wcache.memory.memfd import create_sealed
from wcache.protocol.control import Control
from wcache.protocol.messages import (
    AskLoad,
    LoadOrder,
    Message,
    NothingToLoad,
    Offer,
    Publish,
    Published,
    Renew,
)
from wcache.protocol.wire import close_all

T = TypeVar("T")

NBYTES = 4096
WEIGHTS = (content(b"a"), content(b"b"))


def described(weights: Sequence[bytes] = WEIGHTS, **changes: object) -> Manifest:
    """The manifest of ``weights``, one storage at the start of each slab, with their digests."""
    made = manifest(len(weights), nbytes=NBYTES)
    tensors = (torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in weights)
    storages = tuple(
        msgspec.structs.replace(storage, digest=digest(tensor))
        for storage, tensor in zip(made.storages, tensors, strict=True)
    )
    return msgspec.structs.replace(made, storages=storages, **changes)


class Loss:
    """A generation that this process has, and a daemon that has lost it."""

    def __init__(self, places: Places, store: Store, start: Start) -> None:
        self.places = places
        self.manifest = described()
        data = manifests.encode(self.manifest)
        self.digest = manifests.digest(data)
        self.fds = [create_sealed("test-manifest", data), *map(slab, WEIGHTS)]
        """What an engine that has attached would have kept."""
        self._store = store
        self._start = start
        self.daemon: Daemon = start()
        with Control.connect(places.rank(), "loader") as control:
            control.request(AskLoad(source="engine"), LoadOrder)
            message = Publish(slabs=self.manifest.slabs)
            self.served(lambda: control.request(message, Published, self.fds))

    def served(self, work: Callable[[], T]) -> T:
        """Does ``work`` while the daemon has a supervisor that listens."""
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(work)
            self._store.serve(done.done, 60.0)
            return done.result()

    def lose(self, *, ready: bool = True) -> None:
        """The daemon is killed and started anew, and nobody has kept its descriptors."""
        end(self.daemon)
        for fd in self._store.fds.values():
            os.close(fd)
        self._store.fds.clear()
        self.daemon = self._start(ready=ready)
        wait_for(lambda: connects(self.places), "the daemon listens")

    def engine(self) -> Control:
        return Control.connect(self.places.rank(), "client")

    def renew(self, control: Control) -> Message:
        return control.request(Renew(manifest_digest=self.digest, can_offer=True), Message)

    def offer(self, fds: Sequence[int] = (), made: Manifest | None = None) -> Message:
        """Offers ``fds``, or what is right, as a client does that was asked for it."""
        slabs = (made or self.manifest).slabs
        with self.engine() as control:
            return control.request(Offer(slabs=slabs), Message, fds or self.fds)

    def load(self) -> int:
        """Runs a real loader to its end; its exit status."""
        command = [sys.executable, "-m", "wcache.load", "0"]
        environment = {**os.environ, **self.places.environment}
        with (self.places.root / "loader.log").open("ab") as log:
            return self.served(
                lambda: (
                    subprocess.run(
                        command, env=environment, stdout=log, stderr=log, timeout=60, check=False
                    ).returncode
                )
            )

    def check(self) -> str:
        """What a loader does, in this process, which has torch already; what it is told."""

        def work() -> str:
            with Control.connect(self.places.rank(), "loader") as control:
                reply = ask_load(control, "checkpoint")
                assert isinstance(reply, NothingToLoad)
                return reply.message

        return self.served(work)

    def log(self, part: str = "daemon.0") -> str:
        return (self.places.root / f"{part}.log").read_text()

    def close(self) -> None:
        close_all(self.fds)


@contextmanager
def descriptors(made: Manifest, weights: Sequence[bytes] = WEIGHTS) -> Iterator[list[int]]:
    """Sealed memfds of a manifest and of ``weights``."""
    fds = [create_sealed("test-manifest", manifests.encode(made)), *map(slab, weights)]
    try:
        yield fds
    finally:
        close_all(fds)


def flipped(data: bytes) -> bytes:
    """``data`` with one bit that is another one."""
    return bytes([data[0] ^ 1]) + data[1:]
