"""systemctl's words for a unit, and what a rank's report makes of them."""

import time

import pytest

from wcache.supervise.spawn import Ending
from wcache.supervise.systemd.properties import UnitProperties, parse, unit_report, unusable

pytestmark = pytest.mark.unit

SHOWN = """\
Id=wcache@0.service
LoadState=loaded
ActiveState=active
SubState=running
Result=success
StatusText=serving generation 1: a=b
MainPID=17
NRestarts=2
NFileDescriptorStore=9
ExecMainCode=0
ExecMainStatus=0
StateChangeTimestampMonotonic=1000000
Job=0
UnitFileState=enabled

Id=wcache-load@0.service
ActiveState=failed
SubState=failed
Result=exit-code
ExecMainCode=1
ExecMainStatus=78
"""


def unit(**said: object) -> UnitProperties:
    return UnitProperties(id="wcache@0.service", **said)  # type: ignore[arg-type]  # names and values are the test's


def test_several_units_are_read_from_one_answer() -> None:
    found = parse(SHOWN)
    report = unit_report(0, found["wcache@0.service"], found["wcache-load@0.service"])
    assert (report.state, report.main_pid, report.restarts, report.stored_fds) == (
        "active", 17, 2, 9,
    )  # fmt: skip
    assert report.status == "serving generation 1: a=b"
    assert report.result == ""
    assert (report.loader, report.loader_result) == ("failed", "exit 78")
    assert report.since == pytest.approx(time.time() - time.monotonic() + 1.0, abs=1.0)
    assert found["wcache@0.service"].file_state == "enabled"
    assert not found["wcache@0.service"].has_job


@pytest.mark.parametrize("text", ["", "\n\n", "no equals sign", "Id", "ActiveState=active\n"])
def test_an_answer_without_units_is_none(text: str) -> None:
    assert parse(text) == {}


def test_numbers_that_are_none_are_nought() -> None:
    (found,) = parse("Id=x\nMainPID=-1\nNRestarts=[not set]\nExecMainStatus=²\n").values()
    assert (found.main_pid, found.restarts, found.ending) == (0, 0, Ending())


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ({"active_state": "active"}, "active"),
        ({"active_state": "reloading"}, "active"),
        ({"active_state": "activating", "sub_state": "start"}, "starting"),
        ({"active_state": "activating", "sub_state": "auto-restart"}, "restarting"),
        ({"active_state": "activating", "sub_state": "auto-restart-queued"}, "restarting"),
        ({"active_state": "deactivating", "sub_state": "stop-sigterm"}, "stopping"),
        ({"active_state": "failed", "sub_state": "failed"}, "failed"),
        ({"active_state": "inactive"}, "inactive"),
        ({"active_state": "inactive", "has_job": True}, "starting"),
        ({"active_state": "inactive", "sub_state": "dead-resources-pinned"}, "inactive"),
        ({"active_state": "maintenance"}, "inactive"),
    ],
)
def test_states(said: dict[str, object], state: str) -> None:
    assert unit(**said).state == state


@pytest.mark.parametrize(
    ("result", "ending", "words"),
    [
        ("success", Ending(code=0), ""),
        ("exit-code", Ending(code=78), "exit 78"),
        ("signal", Ending(signal=9), "signal KILL"),
        ("core-dump", Ending(signal=11), "signal SEGV"),
        ("watchdog", Ending(signal=6), "watchdog"),
        ("timeout", Ending(signal=15), "timeout"),
        ("start-limit-hit", Ending(code=1), "start limit hit"),
        ("resources", Ending(), "resources"),
        ("protocol", Ending(code=0), "protocol"),
    ],
)
def test_endings(result: str, ending: Ending, words: str) -> None:
    assert unit(active_state="failed", result=result, ending=ending).ended == words


def test_a_daemon_that_ended_well_without_a_command_is_said_to_have_ended() -> None:
    waits = unit(
        active_state="activating", sub_state="auto-restart", result="success", ending=Ending(code=0)
    )
    assert waits.ended == "exit 0"


def test_a_unit_with_a_job_is_not_settled() -> None:
    assert unit().is_settled
    assert unit(active_state="failed").is_settled
    assert not unit(has_job=True).is_settled
    assert not unit(active_state="deactivating").is_settled


@pytest.mark.parametrize(
    ("load_state", "said"),
    [
        ("masked", ("wcache@0.service is masked", "systemctl unmask wcache@0.service")),
        ("not-found", ("wcache@0.service is not installed", "wcache install")),
        (
            "bad-setting",
            (
                "wcache@0.service can not be used (bad-setting)",
                "systemd-analyze verify wcache@0.service",
            ),
        ),
        ("loaded", None),
    ],
)
def test_a_unit_that_can_not_run_is_told_with_its_remedy(
    load_state: str, said: tuple[str, str] | None
) -> None:
    assert unusable(unit(load_state=load_state)) == said


def test_a_unit_that_was_started_too_often_is_told_with_its_remedy() -> None:
    limited = unit(active_state="failed", result="start-limit-hit", ending=Ending(code=1))
    report = unit_report(0, limited, UnitProperties(id="wcache-load@0.service"))
    assert report.state == "failed"
    assert "start limit" in report.fault
    assert "systemctl reset-failed wcache@0.service" in report.mend


def test_the_size_of_the_store_is_that_of_a_daemon_that_runs() -> None:
    found = parse(SHOWN.replace("NRestarts=2", "FileDescriptorStoreMax=9"))["wcache@0.service"]
    loader = UnitProperties(id="wcache-load@0.service")
    assert unit_report(0, found, loader).max_fds == 9
    assert unit_report(0, unit(max_fds=9), loader).max_fds is None
