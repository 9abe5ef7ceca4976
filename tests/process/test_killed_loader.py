"""A loader that is killed at any point costs a load, never weights."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.checkpoints import write_checkpoint
from tests.cli.snapshot import Done, wcache
from tests.places import Places
from wcache.errors import NoSuchRankError
from wcache.paths import InstancePaths
from wcache.protocol import Report
from wcache.ranks import ask
from wcache.state import RankState

pytestmark = pytest.mark.process

PATIENCE_S = 30.0
# The two that last long enough to be met for certain: torch is imported in the first.
PHASES = ["plan", "read"]


class Node:
    """An instance with a checkpoint so large that each phase of its load can be seen."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.paths: InstancePaths = places.instance()

    def checkpoint(self, name: str, fill: float) -> Path:
        tensors = {
            f"layer.{index}.weight": torch.full((4096, 4096), fill + index, dtype=torch.bfloat16)
            for index in range(24)
        }
        return write_checkpoint(self.places.root / name, tensors)

    def up(self, checkpoint: Path) -> Done:
        return wcache(self.places, "up", "--model", str(checkpoint), "--device", "cpu")

    def report(self) -> Report | None:
        return ask(self.paths.rank(0))


@pytest.fixture
def node(places: Places) -> Iterator[Node]:
    made = Node(places)
    yield made
    wcache(places, "down", "--force")


def kill_loader_in(node: Node, phase: str) -> None:
    """Kills the loader when it says that it is in ``phase``."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(NoSuchRankError):
            report = node.report()
            if report and report.progress and report.progress.phase == phase:
                os.kill(report.progress.loader_pid, signal.SIGKILL)
                return
    raise AssertionError(f"no loader came to {phase}")


def up_while_killing(node: Node, checkpoint: Path, phase: str) -> Done:
    """``wcache up`` whose loader is killed in ``phase``."""
    with ThreadPoolExecutor(1) as pool:
        kill = pool.submit(kill_loader_in, node, phase)
        done = node.up(checkpoint)
        kill.result(PATIENCE_S)
    return done


@pytest.mark.parametrize("phase", PHASES)
def test_first_load_that_is_killed_fails_with_its_reason_and_can_be_repeated(
    node: Node, phase: str
) -> None:
    checkpoint = node.checkpoint("model", 1)
    done = up_while_killing(node, checkpoint, phase)
    assert done.code == 1
    assert "ended before it had published" in done.stderr
    assert node.report() is None
    done = wcache(node.places, "status")
    assert done.code == 3
    assert "ended before it had published" in done.stdout
    assert node.up(checkpoint).code == 0
    assert wcache(node.places, "verify").code == 0


@pytest.mark.parametrize("phase", PHASES)
def test_reload_that_is_killed_leaves_the_weights_served(node: Node, phase: str) -> None:
    assert node.up(node.checkpoint("model", 1)).code == 0
    before = node.report()
    other = node.checkpoint("other", 100)
    done = up_while_killing(node, other, phase)
    assert done.code == 1
    assert "ended before it had published" in done.stderr
    after = node.report()
    assert before is not None
    assert after is not None
    assert "ended before it had published" in after.problems[-1]
    assert after.state is RankState.READY
    assert (after.pid, after.generations) == (before.pid, before.generations)
    assert node.up(other).code == 0
    assert wcache(node.places, "verify").code == 0
