"""What ``warm`` decides to do to each rank, and what it must not."""

from dataclasses import replace

import msgspec
import pytest

from tests.cli.views import (
    GIB,
    absent,
    config,
    progress,
    report,
    serving,
    staged,
    unit,
    with_generation,
)
from wcache.config import Config
from wcache.fingerprint import wanted_by
from wcache.ranks import RankView
from wcache.rollout.up_plan import Need
from wcache.rollout.warm_plan import WarmPlan, decide, losses

pytestmark = pytest.mark.cli

A = config("sha256:" + "a" * 64)
B = config("sha256:" + "b" * 64)
C = config("sha256:" + "c" * 64)


def plan(
    *views: RankView, of: Config = B, replace: bool = False, free: int = 8 * GIB, need: int = GIB
) -> WarmPlan:
    needs = {one.rank: Need(rank=one.rank, device="cpu", nbytes=need) for one in views}
    by_rank = {one.rank: one for one in views}
    return decide("", by_rank, of, replace=replace, needs=needs, free={"cpu": free})


def actions(found: WarmPlan) -> list[str]:
    return [one.action for one in found.ranks]


def test_wanted_weights_are_kept_and_nothing_is_needed() -> None:
    found = plan(serving(0, of=B, leases=3), serving(1, of=B))
    assert found.is_needless
    assert found.free_bytes == {}


def test_other_weights_are_loaded_beside_those_that_engines_use() -> None:
    found = plan(serving(0, of=A, leases=2), serving(1, of=B))
    assert actions(found) == ["load", "keep"]
    assert (found.ranks[0].leases, found.problem) == (2, "")
    assert found.staged == [0]


@pytest.mark.parametrize("role", ["held", "draining", "staged"])
def test_weights_that_are_there_are_not_loaded_again(role: str) -> None:
    one = with_generation(serving(0, of=A), B, role=role)  # type: ignore[arg-type]  # one of them
    found = plan(one)
    assert (actions(found), found.staged, found.free_bytes) == (["switch"], [0], {})


def test_a_load_that_is_under_way_is_followed() -> None:
    one = serving(0, of=A, staging=wanted_by(B, 0), progress=progress())
    assert actions(plan(one)) == ["follow"]
    assert plan(one, of=C).problem == "rank 0: other weights are being loaded (pid 50)"


def test_an_empty_rank_is_filled_after_the_others_have_switched() -> None:
    empty = RankView(rank=1, report=report(1, wanted=B), unit=unit(1))
    found = plan(serving(0, of=A), empty)
    assert actions(found) == ["load", "fill"]
    assert found.staged == [0]


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (absent(0), "rank 0: not up"),
        (RankView(rank=0, unit=unit(0, state="starting")), "rank 0: starting, and does not answer"),
        (RankView(rank=0, silence="rank 0 does not answer"), "does not answer"),
        (replace(serving(0, of=A), unit=unit(0, state="inactive")), "its supervisor is gone"),
    ],
)
def test_a_rank_that_can_not_be_asked_keeps_all_from_being_touched(
    one: RankView, words: str
) -> None:
    found = plan(one, serving(1, of=A))
    assert words in found.problem
    assert actions(found) == ["refuse", "load"]


def test_what_does_not_fit_is_said_with_the_numbers() -> None:
    found = plan(serving(0, of=A), serving(1, of=A), free=GIB)
    assert found.problem == (
        "not enough memory to load beside what is served: ranks 0, 1 need 2.0 GiB, 1.0 GiB is"
        " free, 2.0 GiB is held by the old weights"
    )
    assert found.hint.startswith("wcache warm --replace frees the old weights before it loads")


def test_old_weights_are_not_to_be_given_up_where_that_would_not_do() -> None:
    found = plan(serving(0, of=A), free=GIB, need=3 * GIB)
    assert "1.0 GiB is free, 1.0 GiB is held by the old weights" in found.problem
    assert (
        found.hint == "with --replace, which frees the old weights first, it would not fit either"
    )
    assert plan(serving(0, of=A), free=GIB, need=2 * GIB).hint.startswith("wcache warm --replace ")


def test_what_is_held_for_rollback_makes_room() -> None:
    one = with_generation(serving(0, of=A), C, role="held")
    found = plan(one, free=GIB, need=2 * GIB)
    assert (found.problem, found.ranks[0].freed_bytes) == ("", GIB)


def test_what_an_engine_has_mapped_makes_no_room() -> None:
    one = with_generation(serving(0, of=A, leases=1), C, role="held")
    assert one.report is not None
    lease = msgspec.structs.replace(one.report.leases[0], generation=2)
    used = replace(one, report=msgspec.structs.replace(one.report, leases=(lease,)))
    found = plan(used, free=GIB, need=2 * GIB)
    assert "2.0 GiB is held by the old weights" in found.problem


def test_replace_counts_what_it_frees_and_names_it() -> None:
    views = [serving(0, of=A), serving(1, of=A)]
    found = plan(*views, replace=True, free=GIB, need=2 * GIB)
    assert actions(found) == ["replace", "replace"]
    assert "ranks 0, 1 need 4.0 GiB, 1.0 GiB is free and 2.0 GiB more" in found.problem
    enough = plan(*views, replace=True, free=0)
    assert enough.problem == ""
    assert enough.staged == []
    assert losses(enough, {one.rank: one for one in views}) == [
        "rank 0 loses generation 1 (1.0 GiB of /models/a)",
        "rank 1 loses generation 1 (1.0 GiB of /models/a)",
    ]


def test_replace_is_refused_while_an_engine_uses_the_weights() -> None:
    found = plan(serving(0, of=A, leases=1), serving(1, of=A), replace=True)
    assert "pid 900" in found.problem
    assert "stop these engines" in found.hint


def test_a_staged_generation_of_other_weights_is_given_up_first() -> None:
    found = plan(staged(0, of=A, and_staged=C))
    assert (actions(found), found.ranks[0].freed_bytes) == (["load"], GIB)
