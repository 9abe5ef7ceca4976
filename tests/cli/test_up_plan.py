"""What ``up`` decides to do to each rank, and what it must not do."""

import pytest

from tests.cli.views import GIB, absent, config, progress, report, serving, unit
from wcache.errors import ExitCode, OutOfMemoryError, TryAgainError, WcacheError
from wcache.holdings import Holding
from wcache.paths import RankId
from wcache.ranks import RankView
from wcache.rollout.up_plan import Need, check_memory, decide
from wcache.state import RankState

pytestmark = pytest.mark.cli

A = config("sha256:" + "a" * 64)
B = config("sha256:" + "b" * 64)


def test_ranks_that_are_not_up_are_started() -> None:
    rollout = decide({0: absent(0), 1: absent(1)}, A)
    assert (rollout.fresh, rollout.start, rollout.pending) == ([0, 1], [0, 1], [0, 1])
    assert rollout.kept == rollout.load == rollout.leaving == []


def test_ranks_that_hold_the_wanted_weights_are_left_alone() -> None:
    rollout = decide({rank: serving(rank, of=A, leases=3) for rank in range(2)}, A)
    assert rollout.kept == [0, 1]
    assert rollout.start == rollout.pending == []


def test_a_rank_without_a_lease_gets_new_weights_beside_the_old() -> None:
    rollout = decide({0: serving(0, of=A), 1: serving(1, of=B)}, B)
    assert (rollout.load, rollout.kept, rollout.start) == ([0], [1], [])


def test_weights_that_an_engine_uses_are_not_replaced() -> None:
    with pytest.raises(WcacheError) as caught:
        decide({0: serving(0, of=A, leases=2), 1: serving(1, of=A)}, B)
    assert caught.value.exit_code == ExitCode.FAILED
    for part in ("rank 0: pid 900", "rank 0: pid 901", "uid 7", "serve.py", "content: cached"):
        assert part in caught.value.message
    assert "rank 1" not in caught.value.message
    assert "a" * 13 not in caught.value.message
    assert "wcache warm" in caught.value.hint


def test_weights_that_an_engine_published_make_room_by_down_alone() -> None:
    """Neither warm nor a second up loads anything there."""
    with pytest.raises(WcacheError) as caught:
        decide({0: serving(0, of=A, leases=1)}, config(tp=1, loader="publish"))
    assert caught.value.hint.startswith("stop these engines first, then wcache down and")


def test_a_smaller_layout_lets_ranks_go_last() -> None:
    one = config(tp=1)
    rollout = decide({0: serving(0, of=A), 1: serving(1, of=A), 2: absent(2)}, one)
    assert (rollout.load, rollout.leaving, rollout.start) == ([0], [1], [])


def test_a_rank_that_would_go_and_is_used_is_kept() -> None:
    views = {0: serving(0, of=config(tp=1)), 1: serving(1, of=A, leases=1)}
    with pytest.raises(WcacheError, match="rank 1 would be gone") as caught:
        decide(views, config(tp=1))
    assert "pid 900" in caught.value.message


def test_a_load_of_the_wanted_weights_is_followed_and_not_begun_again() -> None:
    loading = RankView(
        rank=0,
        report=report(0, wanted=A, progress=progress(), state=RankState.LOADING),
        unit=unit(0),
    )
    rollout = decide({0: loading, 1: serving(1, of=A)}, A)
    assert (rollout.under_way, rollout.load, rollout.pending) == ([0], [], [0])


def test_a_load_of_other_weights_is_not_cut_off() -> None:
    loading = RankView(rank=0, report=report(0, wanted=A, progress=progress(77)), unit=unit(0))
    with pytest.raises(TryAgainError, match="pid 77"):
        decide({0: loading, 1: absent(1)}, B)


def test_of_many_engines_the_first_are_named() -> None:
    with pytest.raises(WcacheError) as caught:
        decide({0: serving(0, of=A, leases=9), 1: serving(1, of=A, leases=3)}, B)
    assert "pid 907 " in caught.value.message
    assert "pid 908 " not in caught.value.message
    assert "; and 4 more; content: " in caught.value.message


def test_nothing_is_decided_about_a_daemon_that_does_not_answer() -> None:
    silent = RankView(rank=0, silence="rank 0 does not answer within 3 s", unit=unit(0))
    with pytest.raises(TryAgainError, match="does not answer"):
        decide({0: silent, 1: absent(1)}, A)


def test_a_daemon_that_lost_its_supervisor_is_given_one() -> None:
    orphan = RankView(rank=0, report=serving(0, of=A).report, unit=absent(0).unit)
    rollout = decide({0: orphan, 1: serving(1, of=A)}, A)
    assert (rollout.start, rollout.kept, rollout.pending) == ([0], [0, 1], [])


def needs(*sizes: int, device: str = "cpu") -> list[Need]:
    return [Need(rank=rank, device=device, nbytes=size) for rank, size in enumerate(sizes)]


def test_ranks_of_one_device_are_counted_together() -> None:
    check_memory(needs(GIB, GIB), {"cpu": 2 * GIB}, {})
    with pytest.raises(OutOfMemoryError) as caught:
        check_memory(needs(GIB, GIB, GIB), {"cpu": 2 * GIB}, {})
    assert caught.value.message == ("not enough memory: ranks 0 to 2 need 3.0 GiB, 2.0 GiB is free")
    assert "--nnodes" in caught.value.hint


def test_each_gpu_is_counted_for_itself() -> None:
    both = [*needs(GIB, device="GPU-a"), Need(rank=1, device="GPU-b", nbytes=3 * GIB)]
    with pytest.raises(OutOfMemoryError) as caught:
        check_memory(both, {"GPU-a": GIB, "GPU-b": 2 * GIB}, {})
    assert caught.value.message == (
        "not enough memory on GPU-b: rank 1 needs 3.0 GiB, 2.0 GiB is free"
    )
    assert "nvidia-smi" in caught.value.hint


def test_another_instance_that_holds_the_device_is_named_with_what_it_holds() -> None:
    others = [
        Holding(id=RankId("draft", 0), device="GPU-a", nbytes=4 * GIB),
        Holding(id=RankId("", 1), device="GPU-b", nbytes=9 * GIB),
    ]
    with pytest.raises(OutOfMemoryError) as caught:
        check_memory(needs(3 * GIB, device="GPU-a"), {"GPU-a": 2 * GIB}, {}, others)
    assert caught.value.message == (
        "not enough memory on GPU-a: rank 0 needs 3.0 GiB, 2.0 GiB is free;"
        " instance draft holds 4.0 GiB"
    )
    assert caught.value.hint == "wcache down --instance draft frees what that one holds"


def test_other_instances_are_not_asked_when_there_is_room() -> None:
    asked = iter([Holding(id=RankId("draft", 0), device="cpu", nbytes=GIB)])
    check_memory(needs(GIB), {"cpu": GIB}, {}, asked)
    assert len(list(asked)) == 1


def test_old_weights_that_stand_in_the_way_are_named() -> None:
    views = {0: serving(0, of=A)}
    with pytest.raises(OutOfMemoryError) as caught:
        check_memory(needs(2 * GIB), {"cpu": GIB}, views)
    assert "1.0 GiB of old weights" in caught.value.hint
    assert "wcache warm --replace" in caught.value.hint
    # They are not to be given up for nothing.
    with pytest.raises(OutOfMemoryError) as caught:
        check_memory(needs(3 * GIB), {"cpu": GIB}, views)
    assert caught.value.hint == "stop what uses the memory, or spread the ranks with --nnodes"
