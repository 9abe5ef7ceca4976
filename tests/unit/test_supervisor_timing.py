"""How long the supervisor waits between automatic restarts."""

import pytest

from wcache.supervise.direct.timing import Backoff, Timing

pytestmark = pytest.mark.unit


def test_each_failure_doubles_the_wait_up_to_the_limit() -> None:
    backoff = Backoff(Timing())
    assert [round(backoff.next_s(), 3) for _ in range(8)] == [
        0.1,
        0.2,
        0.4,
        0.8,
        1.6,
        3.2,
        5.0,
        5.0,
    ]


def test_a_daemon_that_settled_begins_with_the_first_wait_again() -> None:
    backoff = Backoff(Timing())
    for _ in range(5000):
        backoff.next_s()
    assert backoff.next_s() == Timing().backoff_limit_s
    backoff.reset()
    assert backoff.next_s() == Timing().backoff_first_s
