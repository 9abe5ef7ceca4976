"""A real vLLM over host slabs, in the order of an operator's day; few starts, as each is slow."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engines.serving import Server, until, wcache
from tests.places import Places
from wcache.client import attach
from wcache.errors import NoSuchRankError
from wcache.manifest import Manifest
from wcache.paths import RankPaths
from wcache.protocol.control import Control
from wcache.protocol.messages import AskReport, Report
from wcache.state import RankState

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

Answers = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def rank(model: Path) -> Iterator[Places]:
    """Rank 0, up and empty: it waits for the first engine to publish."""
    places = Places(Path(tempfile.mkdtemp(prefix="wc")))
    wcache(places, "up", "--model", str(model), "--loader", "publish", "--device", "cpu")
    yield places
    wcache(places, "down", "--force")
    shutil.rmtree(places.root, ignore_errors=True)


@pytest.fixture(scope="module")
def stock(rank: Places, model: Path) -> Answers:
    """What vLLM answers without wcache."""
    with Server(rank, model, "--mode", "off") as server:
        record = server.ready()
        assert record.outcome == "off"
        assert record.command == server.command
        assert "'load_format'" not in server.log.read_text()
        assert report(rank).leases == ()
        return server.answers()


@pytest.fixture(scope="module")
def pair(rank: Places, stock: Answers, model: Path) -> Iterator[tuple[Server, Server]]:
    """Two engines that were started at the same time over an empty rank."""
    with Server(rank, model) as one, Server(rank, model) as other:
        one.ready()
        other.ready()
        yield one, other


def report(places: Places) -> Report:
    paths: RankPaths = places.rank()
    with Control.connect(paths, "operator") as control:
        return control.request(AskReport(), Report)


def test_an_engine_that_dies_while_it_publishes_leaves_the_rank_empty(
    rank: Places, model: Path
) -> None:
    with Server(rank, model) as server:
        until(
            lambda: report(rank).progress is not None or server.process.poll() is not None, "load"
        )
        progress = report(rank).progress
        assert progress is not None, server.tail()
        os.killpg(os.getpgid(progress.loader_pid), signal.SIGKILL)
        until(lambda: report(rank).progress is None, "the daemon to notice")
        now = report(rank)
        assert (now.state, now.generations) == (RankState.EMPTY, ())
        assert server.process.wait(120) == 128 + signal.SIGKILL


def test_an_engine_whose_daemon_dies_while_it_reads_says_so(rank: Places, model: Path) -> None:
    with Server(rank, model, "--on-mismatch", "fail") as server:
        until(
            lambda: report(rank).progress is not None or server.process.poll() is not None, "load"
        )
        os.kill(report(rank).pid, signal.SIGKILL)
        record = server.ended()
        assert server.process.returncode == 1, server.tail()
    assert (record.outcome, record.reason) == (
        "miss",
        "rank 0: the weights were read from disk and not published: the daemon of rank 0 ended"
        " meanwhile",
    )
    assert "hint: the next engine that starts publishes" in server.log.read_text()
    assert report(rank).generations == ()


def test_of_two_cold_starts_one_publishes_and_the_other_attaches(
    rank: Places, pair: tuple[Server, Server]
) -> None:
    records = [server.ready() for server in pair]
    assert sorted(str(record.outcome) for record in records) == ["hit", "published"]
    now = report(rank)
    assert [held.number for held in now.generations] == [1]
    assert len(now.leases) == 2


def test_the_start_is_told_in_phases(pair: tuple[Server, Server]) -> None:
    hit = next(server.ready() for server in pair if server.ready().outcome == "hit")
    phases = [phase.name for phase in hit.phases]
    assert phases == [
        "imports", "distributed", "weights", "profile", "init", "server", "port", "first token"
    ]  # fmt: skip
    assert [step.name for step in hit.steps] == [
        "fetch",
        "map",
        "build",
        "bind",
        "process",
        "attach",
    ]


def test_both_give_the_tokens_of_a_start_without_wcache(
    stock: Answers, pair: tuple[Server, Server]
) -> None:
    assert [server.answers() for server in pair] == [stock, stock]


def test_a_loader_process_without_an_engine_makes_the_same_bytes(
    rank: Places, pair: tuple[Server, Server], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wcache(rank, "up", "--instance", "alone", "--model", str(model), "--loader", "vllm",
           "--dtype", "bfloat16", "--device", "cpu")  # fmt: skip
    for name, value in rank.environment.items():
        monkeypatch.setenv(name, value)
    with attach(rank=0) as published, attach(rank=0, instance="alone") as loaded:
        assert _described(loaded.manifest) == _described(published.manifest)
        assert loaded.manifest.extras == published.manifest.extras
        # What an engine wants of either is what the other was found to be.
        mine, other = loaded.fingerprint, published.fingerprint
        assert (mine.loader, other.loader) == ("vllm", "publish")
        alike = {name: getattr(other, name) for name in ("model", "loader")}
        assert msgspec.structs.replace(mine, **alike) == other
    wcache(rank, "down", "--instance", "alone")


def _described(manifest: Manifest) -> dict[str, tuple[object, ...]]:
    return {
        tensor.name: (
            manifest.storages[tensor.storage].digest, tensor.dtype, tensor.shape, tensor.stride,
            tensor.kind, tensor.tied_to,
        )
        for tensor in manifest.tensors
    }  # fmt: skip


def test_answers_stay_the_same_when_the_daemon_is_killed(
    rank: Places, stock: Answers, pair: tuple[Server, Server], model: Path
) -> None:
    before = report(rank)
    os.kill(before.pid, signal.SIGKILL)
    assert [server.answers() for server in pair] == [stock, stock]

    def is_back() -> bool:
        try:
            now = report(rank)
        except (NoSuchRankError, OSError):
            return False
        return now.pid != before.pid and len(now.leases) == 2

    until(is_back, "a new daemon with both leases")
    held = report(rank).serving
    assert held is not None
    assert held.how == "adopted"
    assert before.serving is not None
    assert held.manifest_digest == before.serving.manifest_digest
    with Server(rank, model) as third:
        assert third.ready().outcome == "hit"
        assert third.answers() == stock
    assert [server.answers() for server in pair] == [stock, stock]


def test_a_fine_tune_of_the_same_layout_is_a_mismatch(
    rank: Places, pair: tuple[Server, Server], model: Path
) -> None:
    tuned = rank.root / "tuned"
    shutil.copytree(model, tuned)
    weights = load_file(model / "model.safetensors")
    changed = {name: (one * 1.01).to(one.dtype) for name, one in weights.items()}
    assert not torch.equal(changed["model.norm.weight"], weights["model.norm.weight"])
    save_file(changed, tuned / "model.safetensors", metadata={"format": "pt"})
    with Server(rank, tuned, "--on-mismatch", "fail") as server:
        record = server.ended()
        assert server.process.returncode != 0
    assert record.outcome == "mismatch"
    assert "content: cached sha256:" in record.reason
    assert "hint: wcache status shows what is held" in server.log.read_text()
    assert len(report(rank).leases) == 2
