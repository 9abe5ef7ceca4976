"""A loader that is ended at any point costs a load, never weights, and leaves no memory behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.checkpoints import write_checkpoint
from tests.cli.snapshot import Done, environment, wcache
from tests.places import Places
from tests.processes import wait_for
from wcache.errors import NoSuchRankError
from wcache.paths import InstancePaths
from wcache.protocol.messages import Report
from wcache.ranks import ask
from wcache.state import RankState

pytestmark = pytest.mark.process

PATIENCE_S = 60.0
# The two that last long enough to be met for certain: torch is imported in the first.
PHASES = ["plan", "read"]
SLAB = "memfd:wcache-slab"


class Node:
    """An instance with a checkpoint so large that each phase of its load can be seen."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.paths: InstancePaths = places.instance()

    def checkpoint(self, name: str, fill: float, layers: int = 24) -> Path:
        tensors = {
            f"layer.{index}.weight": torch.full((4096, 4096), fill + index, dtype=torch.bfloat16)
            for index in range(layers)
        }
        return write_checkpoint(self.places.root / name, tensors)

    def up(self, checkpoint: Path) -> Done:
        return wcache(self.places, "up", "--model", str(checkpoint), "--device", "cpu")

    def report(self) -> Report | None:
        return ask(self.paths.rank(0))

    def slabs(self) -> set[int]:
        """Inodes of all slabs that a process of this instance has open or mapped."""
        found: set[int] = set()
        for folder in self.processes():
            # A process that ends meanwhile has none.
            with contextlib.suppress(OSError):
                for link in (folder / "fd").iterdir():
                    with contextlib.suppress(FileNotFoundError):
                        if SLAB in str(link.readlink()):
                            found.add(link.stat().st_ino)
                for line in (folder / "maps").read_text().splitlines():
                    if SLAB in line:
                        found.add(int(line.split()[4]))
        return found

    def processes(self) -> list[Path]:
        """Of daemons, loaders, supervisors and commands: known by the test's folder."""
        mine = os.fsencode(self.places.root)
        found = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit() or int(folder.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if mine in (folder / "environ").read_bytes():
                    found.append(folder)
        return found


@pytest.fixture
def node(places: Places) -> Iterator[Node]:
    made = Node(places)
    yield made
    wcache(places, "down", "--force")


def loader_in(node: Node, phase: str) -> int:
    """The pid of the loader once it says that it is in ``phase``, and has done a part of it."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(NoSuchRankError):
            report = node.report()
            now = report.progress if report else None
            if now and now.phase == phase and (now.done_bytes or not now.total_bytes):
                return now.loader_pid
    raise AssertionError(f"no loader came to {phase}")


def up_while_ending(
    node: Node, checkpoint: Path, phase: str, how: signal.Signals = signal.SIGKILL
) -> Done:
    """``wcache up`` whose loader is ended in ``phase``."""
    with ThreadPoolExecutor(1) as pool:
        kill = pool.submit(lambda: os.kill(loader_in(node, phase), how))
        done = node.up(checkpoint)
        kill.result(PATIENCE_S)
    return done


@contextlib.contextmanager
def up_at_work(node: Node, checkpoint: Path) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-m", "wcache", "up", "--model", str(checkpoint), "--device", "cpu"]
    with subprocess.Popen(
        command, env=environment(node.places), cwd=node.places.root, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("phase", PHASES)
def test_first_load_that_is_killed_fails_with_its_reason_and_can_be_repeated(
    node: Node, phase: str
) -> None:
    checkpoint = node.checkpoint("model", 1)
    done = up_while_ending(node, checkpoint, phase)
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
    done = up_while_ending(node, other, phase)
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


def test_reload_that_is_asked_to_end_gives_its_memory_up(node: Node) -> None:
    assert node.up(node.checkpoint("model", 1)).code == 0
    before, slabs = node.report(), node.slabs()
    assert len(slabs) == 1
    other = node.checkpoint("other", 100)
    seen: list[tuple[int, set[int]]] = []

    def look_and_end() -> None:
        pid = loader_in(node, "read")
        seen.append((pid, node.slabs()))
        os.kill(pid, signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(look_and_end)
        done = node.up(other)
        ended.result(PATIENCE_S)
    assert (done.code, "ended before it had published" in done.stderr) == (1, True)
    ((pid, in_the_midst),) = seen
    assert in_the_midst > slabs  # or the next lines could not fail
    assert node.slabs() == slabs
    assert not Path(f"/proc/{pid}").exists()
    after = node.report()
    assert before is not None
    assert after is not None
    assert (after.pid, after.generations) == (before.pid, before.generations)
    assert after.state is RankState.READY
    # The configuration wants the other weights by now.
    assert "24 storages with 768.0 MiB have their mix64" in wcache(node.places, "verify").stdout
    assert node.up(other).code == 0
    assert len(node.slabs()) == 1
    assert not node.slabs() & in_the_midst
    assert wcache(node.places, "verify").code == 0


@pytest.mark.parametrize("phase", PHASES)
def test_down_in_the_midst_of_a_load_ends_it_and_leaves_nothing(node: Node, phase: str) -> None:
    checkpoint = node.checkpoint("model", 1)
    with up_at_work(node, checkpoint) as up:
        loader = loader_in(node, phase)
        # One command at a time; the load goes on when this one is given up.
        assert wcache(node.places, "down").code == 75
        up.send_signal(signal.SIGINT)
        _, said = up.communicate(timeout=PATIENCE_S)
        assert up.returncode == 130
        assert "loading goes on" in said
        done = wcache(node.places, "down")
    assert (done.code, "rank 0 down" in done.stderr) == (0, True)
    assert not Path(f"/proc/{loader}").exists()
    assert node.slabs() == set()
    wait_for(lambda: node.processes() == [], "the supervisor has ended")
    # Asked to end, it did: nobody had to kill it.
    assert "does not end" not in wcache(node.places, "logs", "--supervisor").stdout
    assert node.up(checkpoint).code == 0
    assert wcache(node.places, "verify").code == 0


def test_down_in_the_midst_of_a_reload_frees_both_generations(node: Node) -> None:
    assert node.up(node.checkpoint("model", 1)).code == 0
    other = node.checkpoint("other", 100)
    with up_at_work(node, other) as up:
        loader = loader_in(node, "read")
        assert len(node.slabs()) == 2
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=PATIENCE_S)
        assert wcache(node.places, "down").code == 0
    assert not Path(f"/proc/{loader}").exists()
    assert node.slabs() == set()
    # The configuration is that of the weights that were asked for last.
    assert wcache(node.places, "up").code == 0
    report = node.report()
    assert report is not None
    assert report.serving is not None
    assert report.serving.how == "loaded"
    assert wcache(node.places, "verify").code == 0


STAYS = """
import atexit, sys, threading
if "wcache.load" in sys.orig_argv:
    atexit.register(threading.Event().wait)
"""


def test_what_an_engine_leaves_in_a_loader_does_not_keep_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next loader would wait for its end, and on a GPU its context would take memory."""
    node.places.root.joinpath("sitecustomize.py").write_text(STAYS)
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{node.places.root}:{before}".rstrip(":"))
    assert node.up(node.checkpoint("model", 1, layers=1)).code == 0
    loaders = [folder for folder in node.processes() if is_loader(folder)]
    wait_for(lambda: not any(folder.exists() for folder in loaders), "the loader has ended")
    assert node.up(node.checkpoint("other", 100, layers=1)).code == 0


def is_loader(process: Path) -> bool:
    with contextlib.suppress(OSError):
        return b"wcache.load" in (process / "cmdline").read_bytes()
    return False
