"""When a rank that is waited for is ready, and when it is not going to be."""

import pytest

from tests.cli.views import absent, config, progress, report, serving, staged, unit
from wcache.config import Config
from wcache.fingerprint import wanted_by
from wcache.ranks import RankView
from wcache.rollout.follow import MAX_RESTARTS, SETTLE_S, judge
from wcache.state import RankState

pytestmark = pytest.mark.cli

A = config("sha256:" + "a" * 64)
B = config("sha256:" + "b" * 64)
PUBLISH = Config(model=A.model.__class__(path="mine", loader="publish"))
NOW, LATER = 0.1, SETTLE_S + 1


def outcome(
    one: RankView, of: Config = A, *, before: RankView | None = None, elapsed: float = LATER
) -> tuple[str, str]:
    verdict = judge(one, of, before=before or absent(0), elapsed_s=elapsed)
    return verdict.outcome, verdict.said


def empty(**fields: object) -> RankView:
    return RankView(rank=0, report=report(0, wanted=A), unit=unit(0, **fields))


def test_a_rank_that_serves_the_wanted_weights_is_ready() -> None:
    assert outcome(serving(0, of=A))[0] == "ready"


def test_a_rank_that_still_serves_the_old_weights_is_waited_for() -> None:
    assert outcome(serving(0, of=B, staging=wanted_by(A, 0)), A)[0] == "waits"


def test_a_rank_that_has_loaded_the_wanted_weights_is_waited_for_no_more() -> None:
    found, said = outcome(staged(0, of=B, and_staged=A), A)
    assert (found, "not served yet" in said) == ("ready", True)


def test_a_rank_that_has_forgotten_what_to_load_is_not_waited_for() -> None:
    assert outcome(serving(0, of=B), A, elapsed=NOW)[0] == "waits"
    assert outcome(serving(0, of=B), A) == (
        "failed", "the daemon does not want other weights any more"
    )  # fmt: skip


def test_progress_is_passed_on() -> None:
    one = RankView(rank=0, report=report(0, progress=progress(done=3, total=9)), unit=unit(0))
    verdict = judge(one, A, before=absent(0), elapsed_s=LATER)
    assert (verdict.outcome, verdict.said) == ("waits", "read")
    assert (verdict.done_bytes, verdict.total_bytes) == (3, 9)


def test_a_first_load_that_failed_says_why() -> None:
    failed = report(0, state=RankState.FAILED, status="load failed: no such shard")
    assert outcome(RankView(rank=0, report=failed)) == ("failed", "no such shard")


@pytest.mark.parametrize("state", ["failed", "restarting", "inactive", "stopping"])
def test_the_last_words_of_a_daemon_that_ended_are_the_reason(state: str) -> None:
    ended = unit(0, state=state, status="load failed: no such shard", result="exit 78")
    assert outcome(RankView(rank=0, unit=ended)) == ("failed", "no such shard")


def test_a_daemon_that_can_not_start_says_how_it_ended() -> None:
    ended = unit(0, state="failed", result="exit 1")
    assert outcome(RankView(rank=0, unit=ended)) == ("failed", "the daemon ended with exit 1")


def test_a_rank_that_somebody_stopped_is_not_waited_for() -> None:
    assert outcome(absent(0), elapsed=NOW)[0] == "waits"
    assert outcome(absent(0), elapsed=LATER)[0] == "failed"


def test_a_daemon_that_keeps_ending_is_given_up() -> None:
    def restarted(times: int) -> RankView:
        return RankView(rank=0, unit=unit(0, state="restarting", restarts=times, result="signal 9"))

    before = RankView(rank=0, unit=unit(0, restarts=10))
    assert outcome(restarted(10 + MAX_RESTARTS - 1), before=before)[0] == "waits"
    assert outcome(restarted(10 + MAX_RESTARTS), before=before)[0] == "failed"


def test_a_loader_that_failed_before_it_asked_ends_the_wait() -> None:
    one = empty(loader="failed", loader_result="signal KILL")
    assert outcome(one) == ("failed", "the loader failed: signal KILL")


def test_a_failed_reload_is_a_failure_though_the_old_weights_are_served() -> None:
    old = serving(0, of=B, problems=("the last load failed: disk is gone",))
    one = RankView(rank=0, report=old.report, unit=unit(0, loader="failed", loader_result="exit 1"))
    assert outcome(one, A) == ("failed", "the last load failed: disk is gone")


def test_the_failure_of_an_earlier_loader_is_not_taken_for_this_one() -> None:
    before = RankView(rank=0, unit=unit(0, loader="failed", loader_result="exit 1"))
    one = empty(loader="failed", loader_result="exit 1")
    assert outcome(one, before=before, elapsed=NOW)[0] == "waits"
    assert outcome(one, before=before, elapsed=LATER)[0] == "failed"


def test_a_rank_that_an_engine_fills_is_done_when_its_daemon_waits() -> None:
    assert outcome(empty(), PUBLISH) == ("ready", "up, waits for the first engine to publish")
    assert outcome(serving(0, of=A), PUBLISH)[1].startswith("up, serves other weights: ")


def test_without_the_supervisors_word_an_absent_daemon_is_no_news() -> None:
    assert outcome(RankView(rank=0)) == ("waits", "")
