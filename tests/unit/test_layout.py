"""Layouts as tables: which ranks a node has, and what each of them is."""

import pytest

from wcache.errors import NoSuchRankError
from wcache.layout import Layout

pytestmark = pytest.mark.unit

NODES = [
    # tp pp dp ep nnodes node_rank -> local ranks
    ((1, 1, 1, 1, 1, 0), [0]),
    ((8, 1, 1, 1, 1, 0), [0, 1, 2, 3, 4, 5, 6, 7]),
    ((3, 1, 1, 1, 1, 0), [0, 1, 2]),
    ((8, 2, 1, 1, 2, 0), [0, 1, 2, 3, 4, 5, 6, 7]),
    ((8, 2, 1, 1, 2, 1), [8, 9, 10, 11, 12, 13, 14, 15]),
    ((4, 1, 2, 8, 2, 1), [4, 5, 6, 7]),
    ((16, 1, 1, 16, 4, 3), [12, 13, 14, 15]),
    ((2, 3, 2, 4, 6, 4), [8, 9]),
]


@pytest.mark.parametrize(("sizes", "ranks"), NODES)
def test_a_node_has_its_consecutive_share_of_the_ranks(
    sizes: tuple[int, ...], ranks: list[int]
) -> None:
    tp, pp, dp, ep, nnodes, node_rank = sizes
    layout = Layout(tp=tp, pp=pp, dp=dp, ep=ep, nnodes=nnodes, node_rank=node_rank)
    assert list(layout.problems()) == []
    assert list(layout.local_ranks()) == ranks
    assert [layout.coordinates(rank).local_rank for rank in ranks] == list(range(len(ranks)))
    assert {layout.coordinates(rank).node_rank for rank in ranks} == {node_rank}


def test_ranks_count_tp_first_then_pp_then_dp() -> None:
    layout = Layout(tp=2, pp=2, dp=2, ep=2)
    table = [
        (one.tp_rank, one.pp_rank, one.dp_rank, one.ep_rank)
        for one in map(layout.coordinates, range(layout.world_size))
    ]
    assert table == [
        (0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0),
        (0, 0, 1, 1), (1, 0, 1, 1), (0, 1, 1, 1), (1, 1, 1, 1),
    ]  # fmt: skip


def test_experts_are_spread_over_the_tp_and_dp_ranks_of_a_stage() -> None:
    layout = Layout(tp=4, dp=2, ep=4)
    assert [layout.coordinates(rank).ep_rank for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_every_pair_of_coordinates_is_another_rank() -> None:
    layout = Layout(tp=2, pp=3, dp=4, ep=8, nnodes=4)
    seen = {
        (one.tp_rank, one.pp_rank, one.dp_rank)
        for one in map(layout.coordinates, range(layout.world_size))
    }
    assert len(seen) == layout.world_size == 24


BAD = [
    (Layout(tp=0), ["tp"]),
    (Layout(tp=-1, pp=0, dp=0, ep=0, nnodes=0), ["tp", "pp", "dp", "ep", "nnodes"]),
    (Layout(tp=4, ep=3), ["ep"]),
    (Layout(tp=4, nnodes=3), ["nnodes"]),
    (Layout(tp=4, nnodes=2, node_rank=2), ["node_rank"]),
    (Layout(tp=4, nnodes=2, node_rank=-1), ["node_rank"]),
    (Layout(tp=4, ep=3, nnodes=3, node_rank=9), ["ep", "nnodes", "node_rank"]),
]


@pytest.mark.parametrize(("layout", "fields"), BAD)
def test_every_size_that_does_not_fit_is_named(layout: Layout, fields: list[str]) -> None:
    problems = list(layout.problems())
    assert [field for field, _ in problems] == fields
    for field, text in problems:
        assert str(getattr(layout, field)) in text


@pytest.mark.parametrize("rank", [-1, 4, 1000])
def test_a_rank_that_the_layout_has_not_is_refused(rank: int) -> None:
    with pytest.raises(NoSuchRankError) as caught:
        Layout(tp=4).coordinates(rank)
    assert str(rank) in caught.value.message
    assert "0 to 3" in caught.value.hint
