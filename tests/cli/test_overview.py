"""What ``status`` makes of what it is told: states, problems, exit codes."""

from collections.abc import Iterable
from typing import cast

import msgspec
import pytest

from tests.cli.views import absent, config, report, serving, unit, with_generation
from tests.places import Places
from wcache.commands.overview import (
    InstanceStatus,
    LeaseStatus,
    collect,
    generation_rows,
    next_step,
    problem_lines,
    rank_status,
    tables,
)
from wcache.commands.restart import _check as check_restart
from wcache.commands.restart import _kept as kept
from wcache.config import Config
from wcache.errors import ExitCode, TryAgainError, WcacheError
from wcache.protocol.reports import ProgressReport
from wcache.ranks import RankView, told_together
from wcache.state import RankState
from wcache.supervise.interface import Supervisor, UnitReport

pytestmark = pytest.mark.cli

A = config("sha256:" + "a" * 64)
B = config("sha256:" + "b" * 64)


def status(
    *views: RankView, of: Config | None = A, problems: tuple[str, ...] = ()
) -> InstanceStatus:
    return InstanceStatus(
        instance="", config_file="x.toml", supervisor="direct", model="m", revision=None,
        ready=True, ranks=tuple(rank_status(one, of) for one in views), leases=(),
        generations=tuple(generation_rows(views)), problems=problems,
    )  # fmt: skip


def test_all_ranks_ready_is_done() -> None:
    found = status(serving(0, of=A), serving(1, of=A))
    assert found.exit_code == ExitCode.DONE
    assert problem_lines(found) == []


def test_one_rank_that_is_not_ready_is_not_ready() -> None:
    found = status(serving(0, of=A), absent(1))
    assert found.exit_code == ExitCode.NOT_READY
    assert [row.state for row in found.ranks] == ["ready", "down"]


def test_other_weights_than_the_wanted_are_a_mismatch() -> None:
    held = serving(0, of=A).report
    assert held is not None
    drifted = msgspec.structs.replace(held, differences=serving_differences())
    found = status(RankView(rank=0, report=drifted, unit=unit(0, stored_fds=3)))
    assert found.exit_code == ExitCode.MISMATCH
    assert next_step(found).startswith("wcache up loads what is wanted")
    published = msgspec.structs.replace(found, loader="publish")
    assert next_step(published).startswith("wcache down, once no engine uses them")
    progress = ProgressReport(
        generation=2, loader_pid=9, phase="read", done_bytes=1, total_bytes=2, since=0.0
    )
    at_work = msgspec.structs.replace(drifted, progress=progress)
    assert next_step(status(RankView(rank=0, report=at_work, unit=unit(0, stored_fds=3)))) == ""
    assert problem_lines(found) == [
        "rank 0: serves other weights than the configuration wants: content: cached"
        " sha256:aaaaaaaaaaaa…, wanted sha256:bbbbbbbbbbbb…"
    ]


def serving_differences() -> object:
    from wcache.fingerprint import compare, held_from, wanted_by

    return compare(held_from(A, 0), wanted_by(B, 0))


def test_a_configuration_that_can_not_be_read_hides_nothing_that_runs() -> None:
    found = status(serving(0, of=A), of=None, problems=("x.toml: is not TOML",))
    assert found.exit_code == ExitCode.CONFIGURATION
    assert found.ranks[0].ready
    assert problem_lines(found) == ["x.toml: is not TOML"]
    nameless = msgspec.structs.replace(found, model=None)
    assert nameless.headline.startswith("model /models/a, which no configuration names now, tp 2")


def test_what_to_type_next_is_said_when_a_rank_is_not_ready() -> None:
    assert next_step(status(serving(0, of=A), serving(1, of=A))) == ""
    assert next_step(status(serving(0, of=A), absent(1))) == "wcache up starts what is down"
    loading = RankView(rank=1, report=report(1, wanted=A), unit=unit(1, stored_fds=1))
    assert next_step(status(serving(0, of=A), loading)) == ""
    silent = RankView(rank=1, silence="it does not answer", unit=unit(1))
    assert next_step(status(serving(0, of=A), silent)).startswith("wcache doctor says what mends")


def test_what_a_silent_daemon_should_have_stored_is_not_known() -> None:
    silent = RankView(rank=0, silence="it does not answer", unit=unit(0, stored_fds=3))
    (row,) = tables(status(silent))[0].lines()[1:]
    assert "3/?" in row.split()


def test_a_restart_says_what_it_keeps_of_a_silent_daemon() -> None:
    silent = RankView(rank=1, silence="it does not answer", unit=unit(1, stored_fds=3))
    assert kept({0: serving(0, of=A)}) == "1.0 GiB of weights are kept"
    assert kept({1: silent}) == "3 stored descriptors of rank 1 are kept"
    less = RankView(rank=1, silence="it does not answer", unit=unit(1, stored_fds=1))
    assert kept({1: less}) == "1 stored descriptor of rank 1 is kept"
    assert kept({0: serving(0, of=A), 1: silent}) == (
        "1.0 GiB of weights are kept, and 3 stored descriptors of rank 1"
    )


class SilentSupervisor:
    """Is there, and answers nobody."""

    kind = "direct"

    def show(self, _ranks: Iterable[int]) -> dict[int, UnitReport]:
        raise TryAgainError("the supervisor (pid 7) is stopped", hint="kill -CONT 7")


def test_a_supervisor_that_does_not_answer_is_asked_again_later(places: Places) -> None:
    told = collect(places.instance(), [0], cast(Supervisor, SilentSupervisor()))
    assert told.supervisor is None
    assert "the supervisor can not be asked: the supervisor (pid 7) is stopped: kill -CONT 7" in (
        problem_lines(told)
    )
    ready = msgspec.structs.replace(status(serving(0, of=A)), supervisor=None)
    assert ready.exit_code == ExitCode.TRY_AGAIN


def test_what_the_daemon_says_of_the_configuration_is_said_once() -> None:
    one = serving(0, of=A, problems=("x.toml: is not TOML", "disk is full"))
    found = status(one, problems=("x.toml: is not TOML",))
    assert problem_lines(found) == ["x.toml: is not TOML", "rank 0: disk is full"]


def test_a_store_that_dropped_descriptors_is_a_problem() -> None:
    one = RankView(rank=0, report=serving(0, of=A).report, unit=unit(0, stored_fds=1))
    (line,) = problem_lines(status(one))
    assert line == (
        "rank 0: the supervisor keeps 1 of 3 descriptors: a crash would lose the weights: wcache"
        " restart, which has them stored again first"
    )


def test_a_store_that_is_too_small_is_said_with_its_size() -> None:
    small = unit(0, stored_fds=2, max_fds=2)
    (line,) = problem_lines(status(RankView(rank=0, report=serving(0, of=A).report, unit=small)))
    assert line == (
        "rank 0: the supervisor keeps 2 of 3 descriptors: a crash would lose the weights: set"
        " FileDescriptorStoreMax=3 or more, it is 2 (systemctl edit wcache@.service), then wcache"
        " restart, which has them stored again first"
    )
    found = status(RankView(rank=0, report=serving(0, of=A).report, unit=small))
    assert found.exit_code == ExitCode.FAILED


def test_a_unit_that_can_not_be_started_again_is_said_of_a_rank_that_serves() -> None:
    masked = unit(0, stored_fds=3, fault="wcache@0.service is masked", mend="systemctl unmask x")
    found = status(RankView(rank=0, report=serving(0, of=A).report, unit=masked))
    assert problem_lines(found) == ["rank 0: wcache@0.service is masked: systemctl unmask x"]
    dropped = msgspec.structs.replace(masked, stored_fds=0, max_fds=0)
    found = status(RankView(rank=0, report=serving(0, of=A).report, unit=dropped))
    assert problem_lines(found)[1].endswith(
        "a crash would lose the weights: systemctl unmask x, then wcache restart, which has them"
        " stored again first"
    )
    limited = unit(0, state="failed", result="start limit hit", fault="too often", mend="wcache up")
    assert problem_lines(status(RankView(rank=0, unit=limited))) == ["rank 0: too often: wcache up"]


def test_a_restart_that_would_lose_the_weights_is_refused() -> None:
    one = RankView(rank=0, report=serving(0, of=A).report, unit=unit(0, stored_fds=1))
    with pytest.raises(WcacheError, match="1 of 3 descriptors"):
        check_restart({0: one}, named=False, force=False)
    check_restart({0: one}, named=False, force=True)
    check_restart({0: serving(0, of=A)}, named=False, force=False)


def test_a_silent_daemon_is_shown_as_such() -> None:
    found = status(RankView(rank=0, silence="rank 0 does not answer within 3 s", unit=unit(0)))
    assert found.ranks[0].state == "silent"
    assert found.exit_code == ExitCode.NOT_READY
    assert "does not answer" in problem_lines(found)[0]


def test_a_daemon_that_ended_leaves_its_last_words() -> None:
    ended = unit(0, state="failed", result="exit 78", status="load failed: no such shard")
    found = status(RankView(rank=0, unit=ended))
    assert found.ranks[0].state == "failed"
    assert problem_lines(found) == [
        "rank 0: the daemon ended with exit 78: load failed: no such shard"
    ]


def test_what_is_the_same_for_many_ranks_is_said_once() -> None:
    ranks = [
        RankView(rank=rank, unit=unit(rank, state="failed", result="exit 78", status="no shard"))
        for rank in range(12)
    ]
    ranks[3] = RankView(rank=3, unit=unit(3, state="failed", result="exit 1", status="no disk"))
    assert problem_lines(status(*ranks)) == [
        "ranks 0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11: the daemon ended with exit 78: no shard",
        "rank 3: the daemon ended with exit 1: no disk",
    ]


def test_failures_are_told_by_rank_and_not_by_when_they_came() -> None:
    came = {10: "no disk", 2: "no shard", 1: "no disk", 0: "no disk"}
    assert told_together(came.items()) == ["ranks 0, 1, 10: no disk", "rank 2: no shard"]


def test_a_loader_that_failed_is_a_problem_while_nothing_is_served() -> None:
    ended = unit(0, loader="failed", loader_result="exit 1")
    found = status(RankView(rank=0, report=report(0, wanted=A), unit=ended))
    assert "rank 0: the loader failed: exit 1" in problem_lines(found)


def test_a_rank_that_the_configuration_does_not_have_is_shown_and_does_not_count() -> None:
    found = status(serving(0, of=A), serving(1, of=A), serving(5, of=config(tp=8)))
    assert found.exit_code == ExitCode.DONE
    assert problem_lines(found) == ["rank 5: is up and not part of the configuration"]


def test_every_state_has_a_row() -> None:
    for state in RankState:
        one = RankView(rank=0, report=report(0, state=state), unit=unit(0))
        assert status(one).ranks[0].state == state.value


def test_the_document_reads_back() -> None:
    found = status(serving(0, of=A, leases=2), absent(1))
    assert msgspec.json.decode(msgspec.json.encode(found), type=InstanceStatus) == found


def test_leases_have_a_table_of_their_own() -> None:
    lease = LeaseStatus(rank=0, pid=0, uid=7, command="serve\n--port 1", generation=3, since=1000.0)
    found = msgspec.structs.replace(status(serving(0, of=A)), leases=(lease,))
    _, _, table, _ = tables(found, now=1180.0)
    assert table.lines() == [
        "LEASE OF RANK  GEN  PID  UID  SINCE  COMMAND",
        "0                3    -    7  3 min  serve --port 1",
    ]


def test_generations_have_a_table_once_one_of_them_is_not_served() -> None:
    plain = serving(0, of=A, leases=2)
    assert tables(status(plain))[1].rows == []
    held = with_generation(plain, B, role="held", since=40.0)
    rows = tables(status(held), now=100.0)[1].rows
    assert rows == [
        ("0", "1", "serving", "2", "1.0 GiB", "100 s", "/models/a"),
        ("0", "2", "held", "0", "1.0 GiB", "60 s", "/models/a"),
    ]
