"""A machine of a test's own with an operator at it: real daemons, loaders and a supervisor."""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.checkpoints import llama_tensors, write_checkpoint, write_llama
from tests.cli.snapshot import Done, wcache
from tests.places import Places
from wcache.paths import InstancePaths
from wcache.protocol.control import Control
from wcache.protocol.messages import Attach, Attached, Report
from wcache.protocol.wire import close_all, peer_credentials
from wcache.ranks import ask

PATIENCE_S = 60.0
SMALL = ("--device", "cpu", "--slab-bytes", "2MiB")


class Node:
    """A machine of the test's own, with an operator at it."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.root = places.root
        self.model = write_llama(places.root / "model")
        self.paths: InstancePaths = places.instance()

    def __call__(self, *arguments: str) -> Done:
        return wcache(self.places, *arguments)

    def up(self, *arguments: str) -> Done:
        return self("up", "--model", str(self.model), *SMALL, *arguments)

    def report(self, rank: int = 0) -> Report:
        found = ask(self.paths.rank(rank))
        assert found is not None
        return found

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("status", "--json").stdout)
        return found

    @contextlib.contextmanager
    def lease(self, rank: int = 0) -> Iterator[Attached]:
        """An engine that has attached; it is this process."""
        with Control.connect(self.paths.rank(rank), "client") as control:
            attached = control.request(Attach(), Attached)
            close_all(control.channel.take_fds(1 + len(attached.slabs)))
            yield attached


@pytest.fixture
def node(places: Places) -> Iterator[Node]:
    made = Node(places)
    yield made
    _end_everything(made)


def _end_everything(node: Node) -> None:
    """The operator's way, and then by the sockets of whatever would not go."""
    node("down", "--force")
    sockets = sorted(
        node.paths.run.glob("*/control.sock"), key=lambda path: "super" not in str(path)
    )
    for path in sockets:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(path)):
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(peer_credentials(probe).pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not in {PATIENCE_S:g} s: {what}"
        time.sleep(0.05)


def other(node: Node, seed: int = 1) -> str:
    return str(write_checkpoint(node.root / f"other-{seed}", llama_tensors(seed=seed)))


def parts(node: Node, rank: int = 0) -> dict[int, str]:
    return {held.number: held.role for held in node.report(rank).generations}


@contextlib.contextmanager
def no_loader(node: Node, rank: int) -> Iterator[None]:
    """The loader of ``rank`` alone can not be started: its log is no file."""
    log = node.paths.log_file(rank, "loader")
    log.unlink(missing_ok=True)
    log.mkdir(parents=True)
    yield
    log.rmdir()
