"""When a supervisor is of another wcache, and what keeps it from being replaced."""

from typing import Any

import msgspec
import pytest

import wcache
from tests.cli.views import config, report
from wcache.fingerprint import held_from
from wcache.protocol.messages import Report
from wcache.ranks import RankView
from wcache.rollout.renewal import obstacle, outdated
from wcache.supervise.interface import UnitReport

pytestmark = pytest.mark.unit


def told() -> Report:
    held = held_from(config(), 0, content="sha256:" + "a" * 64)
    return report(held=held, wanted=config())


def rank(said: Report | None = None, **unit: Any) -> RankView:
    usual: dict[str, Any] = {"state": "active", "main_pid": 100, "stored_fds": 3}
    return RankView(rank=0, report=said, unit=UnitReport(rank=0, **(usual | unit)))


def test_one_of_the_installed_version_is_not_outdated() -> None:
    assert outdated([rank(supervisor_version=wcache.__version__)]) is None
    assert outdated([]) is None
    assert outdated([RankView(rank=0, report=None, unit=None)]) is None
    # A rank that it does not know is not of it.
    assert outdated([rank(state="inactive"), rank(supervisor_version="0.0.9")]) == "0.0.9"


def test_one_that_does_not_say_its_version_is_outdated() -> None:
    earlier = msgspec.to_builtins(UnitReport(rank=0, state="active"))
    del earlier["supervisor_version"]
    unit = msgspec.convert(earlier, UnitReport)
    assert outdated([RankView(rank=0, report=None, unit=unit)]) == ""


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (rank(told()), ""),
        (rank(state="inactive", stored_fds=0), ""),
        (rank(state="failed", stored_fds=0), ""),
        # The weights are nowhere but in the store, or about to be.
        (rank(state="restarting"), "rank 0 is restarting"),
        (rank(state="inactive"), "rank 0 is inactive"),
        (rank(told(), state="starting"), "rank 0 is starting"),
        (rank(told(), state="stopping"), "rank 0 is stopping"),
        (rank(told(), loader="running"), "rank 0 is loading"),
        (rank(), "rank 0 does not answer"),
        (
            rank(told(), stored_fds=4),
            "it keeps descriptors of rank 0 that the daemon does not hand over",
        ),
    ],
)
def test_it_stays_while_a_daemon_could_not_hand_over_all_of_its_weights(
    one: RankView, why: str
) -> None:
    assert obstacle({0: one}) == why
