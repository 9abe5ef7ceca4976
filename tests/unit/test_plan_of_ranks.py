"""The plans of all ranks of a node: what ranks have in common is found once."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoints import write_llama, write_qwen3
from tests.loading import EMBEDDING, LLAMA
from wcache.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from wcache.config import Config, LayoutSection, MemorySection, ModelSection
from wcache.layout import Layout
from wcache.load.placement import Placement
from wcache.output import Output
from wcache.paths import InstancePaths
from wcache.rollout.up_job import needs

pytestmark = pytest.mark.unit

LAYOUTS = [
    Layout(tp=3),
    Layout(pp=2),
    Layout(tp=3, pp=2),
    Layout(tp=3, dp=2),
    Layout(tp=3, pp=2, dp=2),
    Layout(tp=3, pp=2, nnodes=3, node_rank=1),
]


class Counted(dict[str, TensorEntry]):
    """A checkpoint's tensors, and how often one was looked at."""

    looks = 0

    def __getitem__(self, name: str) -> TensorEntry:
        self.looks += 1
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        self.looks += len(self)
        return super().__iter__()


@pytest.mark.parametrize("tied", [EMBEDDING, None])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_plan_of_a_stage_stands_for_all_its_ranks(
    tmp_path: Path, layout: Layout, tied: str | None
) -> None:
    checkpoint = open_checkpoint(write_llama(tmp_path / "m", tie_word_embeddings=tied is not None))
    spread = Placement(checkpoint, layout, parallel=LLAMA, tied=tied)
    _check_stages(spread, layout)


@pytest.mark.parametrize("tp", [2, 4])
def test_it_does_so_for_fp8_and_its_scales(tmp_path: Path, tp: int) -> None:
    checkpoint = open_checkpoint(write_qwen3(tmp_path / "m", fp8=True))
    parallel = replace(LLAMA, attention_heads=(4,), kv_heads=(4,))
    _check_stages(Placement(checkpoint, Layout(tp=tp), parallel=parallel), Layout(tp=tp))


def _check_stages(spread: Placement, layout: Layout) -> None:
    met: list[int] = []
    for ranks, planned in spread.of_each_stage(layout.local_ranks()):
        met += ranks
        for own in map(spread.of, ranks):
            assert own.total_bytes == planned.total_bytes
            assert [one.source for one in own.targets] == [one.source for one in planned.targets]
            assert [one.nbytes for one in own.targets] == [one.nbytes for one in planned.targets]
    assert sorted(met) == list(layout.local_ranks())


def test_ranks_that_hold_the_same_are_planned_once(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_llama(tmp_path / "m"))
    assert _looks(checkpoint, Layout(tp=3, dp=8)) == _looks(checkpoint, Layout(tp=3))


def test_stages_do_not_look_at_each_others_tensors(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m", num_hidden_layers=16, tie_word_embeddings=False)
    checkpoint = open_checkpoint(path)
    assert _looks(checkpoint, Layout(pp=16)) == _looks(checkpoint, Layout(pp=2))


def _looks(checkpoint: Checkpoint, layout: Layout) -> int:
    tensors = Counted(checkpoint.tensors)
    spread = Placement(replace(checkpoint, tensors=tensors), layout, parallel=LLAMA)
    for _ in spread.of_each_stage(layout.local_ranks()):
        pass
    return tensors.looks


def test_what_ranks_need_is_told_in_their_order(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = write_llama(tmp_path / "m")
    config = Config(
        model=ModelSection(path=str(path)),
        layout=LayoutSection(pp=2, dp=2),
        memory=MemorySection(device="cpu"),
    )
    told = needs(open_checkpoint(path), config, InstancePaths.of(""), Output(quiet=True))
    assert [need.rank for need in told] == [0, 1, 2, 3]
    assert [need.nbytes for need in told[2:]] == [need.nbytes for need in told[:2]]
