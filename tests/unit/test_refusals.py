"""The daemon's log names who was refused and why, and is not filled by it."""

import logging

import pytest

from wcache.daemon.refusals import BURST, MAX_DIFFERENCES, MAX_TEXT, PERIOD_S, Refusals
from wcache.difference import Difference
from wcache.protocol.messages import Refused
from wcache.protocol.reports import LeaseReport

pytestmark = pytest.mark.unit


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def refusals(clock: Clock, caplog: pytest.LogCaptureFixture) -> Refusals:
    caplog.set_level(logging.INFO)
    return Refusals(clock)


def lease(pid: int = 47, command: str = "serve.py --tp 2") -> LeaseReport:
    return LeaseReport(pid=pid, uid=1001, command=command, generation=0, since=0.0)


def other_weights(*found: Difference) -> Refused:
    return Refused(reason="mismatch", message="rank 0 holds other weights", differences=found)


def test_who_was_refused_and_in_which_field(
    refusals: Refusals, caplog: pytest.LogCaptureFixture
) -> None:
    refusals.attach(lease(), other_weights(Difference("tp_size", "4", "2")))
    refusals.attach(lease(pid=0, command=""), Refused(reason="permission", message="uid 1001 no"))
    assert caplog.messages == [
        "pid 47 (uid 1001, serve.py --tp 2) was refused: it wants other weights:"
        " tp_size: cached 4, wanted 2",
        "a process of another pid namespace (uid 1001, no command) was refused: uid 1001 no",
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_an_engine_that_waits_for_weights_is_no_line(
    refusals: Refusals, caplog: pytest.LogCaptureFixture
) -> None:
    refusals.attach(lease(), Refused(reason="not_ready", message="rank 0 is not ready"))
    assert caplog.messages == []


def test_what_a_peer_says_stays_on_one_line_of_bounded_length(
    refusals: Refusals, caplog: pytest.LogCaptureFixture
) -> None:
    found = [Difference(f"switches.a{n}\n", "x" * 4000, "b\x1b[0m\nc") for n in range(100)]
    refusals.attach(lease(), other_weights(*found))
    (line,) = caplog.messages
    assert line.isprintable()
    assert f"switches.a0?: cached {'x' * MAX_TEXT}…, wanted b?[0m?c; " in line
    assert line.endswith("; and 36 more")
    assert len(line) < MAX_DIFFERENCES * (MAX_TEXT + 100)


def test_lines_are_bounded_and_those_that_are_left_out_are_counted(
    refusals: Refusals, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(BURST + 30):
        refusals.line(f"line {number}")
    assert caplog.messages == [f"line {number}" for number in range(BURST)]
    caplog.clear()
    clock.now += PERIOD_S
    refusals.line("one more")
    refusals.line("and not this one")
    assert caplog.messages == ["30 refusals before the next one were not logged", "one more"]
    caplog.clear()
    clock.now += PERIOD_S * 1000
    for number in range(BURST + 1):
        refusals.line(f"later {number}")
    assert len(caplog.messages) == 1 + BURST
    assert caplog.messages[0].startswith("1 refusals")
