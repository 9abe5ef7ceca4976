"""Which GPUs ``wcache up`` writes into a configuration."""

import pytest

from wcache.config import Config
from wcache.machine.devices import Gpu
from wcache.rollout.wanted import Args, from_model

pytestmark = pytest.mark.unit


def gpu(index: int) -> Gpu:
    return Gpu(
        index=index, uuid=f"GPU-{'abcd'[index]}", name="H200", total_bytes=1, free_bytes=1,
        persistence=True,
    )  # fmt: skip


def configured(old: Config | None, *visible: int) -> Config:
    args = Args(model="/m", loader="publish", tp=2, device="cuda")
    return from_model(args, "/m", old, tuple(map(gpu, visible))).config


def test_ranks_stay_on_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    before = configured(None, 1, 0)
    assert before.memory.devices == ("GPU-b", "GPU-a")
    assert configured(before, 0, 1).memory.devices == ("GPU-b", "GPU-a")
    assert configured(before, 0, 1, 2, 3).memory.devices == ("GPU-b", "GPU-a")


def test_the_same_gpus_shown_in_another_order_are_taken_in_that_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = configured(None, 0, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert configured(before, 1, 0).memory.devices == ("GPU-b", "GPU-a")


def test_gpus_among_others_that_are_shown_do_not_move_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = configured(None, 2, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert configured(before, 0, 1, 2, 3).memory.devices == ("GPU-c", "GPU-d")


def test_ranks_whose_gpus_are_not_shown_move(monkeypatch: pytest.MonkeyPatch) -> None:
    before = configured(None, 2, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert configured(before, 0, 1).memory.devices == ("GPU-a", "GPU-b")
