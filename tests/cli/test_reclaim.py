"""Stopping and starting under a live engine, as an operator does it: no byte is read from disk."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from tests.cli.node import SMALL, Node
from tests.cli.snapshot import environment
from tests.processes import end, wait_for
from tests.reclaiming import flipped
from wcache.config import load_config, save_config
from wcache.errors import WcacheError
from wcache.memory.memfd import create_sealed
from wcache.protocol.control import Control
from wcache.protocol.messages import (
    Attach,
    Attached,
    Offer,
    Offered,
    OfferWanted,
    Renew,
)
from wcache.protocol.reports import GenerationReport
from wcache.protocol.wire import close_all, peer_credentials

pytestmark = [pytest.mark.cli, pytest.mark.process]

PUBLISHES = """
import torch, wcache
torch.manual_seed(0)
wcache.publish(torch.nn.Linear(64, 64), model="mine")
"""


class Engine:
    """Attaches, and says for each line of stdin what it reads."""

    def __init__(self, node: Node) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.systemd.engine"], env=environment(node.places),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.pid: int = self._answer()["pid"]

    def say(self) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        end(self._process)
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()


@contextlib.contextmanager
def engine(node: Node) -> Iterator[Engine]:
    made = Engine(node)
    try:
        yield made
    finally:
        made.close()


def serving(node: Node) -> GenerationReport:
    found = node.report().serving
    assert found is not None
    return found


def listener(path: str) -> int:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(path)
        return peer_credentials(probe).pid


def came_back(node: Node, running: Engine, before: GenerationReport, digest: str) -> None:
    """The generation is served again, the engine has its lease and reads what it has read."""
    wait_for(lambda: running.say()["lease"] == "held", "the lease is renewed")
    after = serving(node)
    assert after.how == "reclaimed"
    assert (after.number, after.manifest_digest) == (before.number, before.manifest_digest)
    assert running.say()["digest"] == digest
    assert [lease.pid for lease in node.report().leases] == [running.pid]
    assert node.status()["ranks"][0]["how"] == "reclaimed"
    assert node("status").code == 0
    assert " ok " in node("verify").stdout
    with engine(node) as another:
        assert another.say()["digest"] == digest


def test_down_and_up_under_a_live_engine_need_no_checkpoint(node: Node) -> None:
    assert node.up().code == 0
    before = serving(node)
    with engine(node) as running:
        digest = running.say()["digest"]
        assert node("down", "--force").code == 0
        assert running.say()["lease"] == "renewing"
        node.model.rename(node.root / "away")
        done = node("up")
        assert done.code == 0, done.stderr
        assert "rank 0: engines that still have the weights give them back" in done.stderr
        assert "reclaimed in " in done.stderr
        came_back(node, running, before, digest)


def test_a_supervisor_killed_together_with_its_daemon_loses_nothing(node: Node) -> None:
    """A container that is replaced under engines that go on: nobody has stopped anything."""
    assert node.up().code == 0
    before = serving(node)
    with engine(node) as running:
        digest = running.say()["digest"]
        for path in (node.paths.supervisor_socket, node.paths.rank(0).socket):
            os.kill(listener(str(path)), signal.SIGKILL)
        node.model.rename(node.root / "away")
        assert node("up").code == 0
        came_back(node, running, before, digest)


def test_what_an_engine_published_comes_back_without_any_checkpoint(node: Node) -> None:
    assert node("up", "--model", "mine", "--loader", "publish", *SMALL).code == 0
    subprocess.run(
        [sys.executable, "-c", PUBLISHES], env=environment(node.places), check=True, timeout=60
    )
    before = serving(node)
    with engine(node) as running:
        digest = running.say()["digest"]
        assert node("down", "--force").code == 0
        done = node("up")
        assert done.code == 0
        assert "reclaimed in " in done.stderr
        came_back(node, running, before, digest)


def test_an_engine_with_changed_bytes_is_named_and_the_checkpoint_is_read(node: Node) -> None:
    assert node.up().code == 0
    before = serving(node)
    with Control.connect(node.paths.rank(0), "client") as control:
        attached = control.request(Attach(), Attached)
        manifest, *slabs = control.take_fds(1 + len(attached.slabs))
        changed = []
        for fd, info in zip(slabs, attached.slabs, strict=True):
            data = flipped(os.pread(fd, info.nbytes, 0))
            changed.append(create_sealed("changed", data))
        assert node("down", "--force").code == 0
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(node, "up")
        wait_for(lambda: _offered(node, before, attached, [manifest, *changed]), "it is offered")
        assert done.result().code == 0
    close_all([manifest, *slabs, *changed])
    after = serving(node)
    assert after.how == "loaded"
    assert after.manifest_digest != before.manifest_digest
    (problem,) = node.status()["ranks"][0]["problems"]
    assert problem.startswith(f"pid {os.getpid()} (")
    assert "are not the bytes that were published" in problem
    assert node("verify").code == 0


def _offered(node: Node, before: GenerationReport, attached: Attached, fds: Sequence[int]) -> bool:
    """As a client does it that has noticed the new daemon."""
    try:
        with Control.connect(node.paths.rank(0), "client") as control:
            renew = Renew(manifest_digest=before.manifest_digest, can_offer=True)
            control.request(renew, OfferWanted)
            control.request(Offer(slabs=attached.slabs), Offered, fds)
    except (WcacheError, OSError):
        return False  # it is not there yet
    return True


def test_after_a_down_that_nobody_was_attached_at_the_checkpoint_is_read(node: Node) -> None:
    assert node.up().code == 0
    with engine(node) as running:
        running.say()
    wait_for(lambda: not node.report().leases, "the lease has ended")
    record = node.paths.rank(0).served_file
    found = record.read_bytes()
    assert node("down").code == 0
    assert not record.exists()
    record.write_bytes(found)  # which systemctl stop leaves
    done = node("up")
    assert done.code == 0
    assert "give them back" not in done.stderr
    assert serving(node).how == "loaded"


def test_other_weights_than_the_engine_has_are_loaded_and_the_engine_is_named(node: Node) -> None:
    assert node.up().code == 0
    with engine(node) as running:
        digest = running.say()["digest"]
        assert node("down", "--force").code == 0
        config = load_config(node.paths.config_file)
        model = msgspec.structs.replace(config.model, dtype="float32")
        save_config(msgspec.structs.replace(config, model=model), node.paths.config_file)
        assert node("up").code == 0
        assert serving(node).how == "loaded"
        wait_for(lambda: running.say()["lease"].startswith("lost: "), "the lease is lost")
        assert running.say()["digest"] == digest
