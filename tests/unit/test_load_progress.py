"""What a daemon says of the load that is under way."""

import time

import pytest

from wcache.daemon import words
from wcache.daemon.load import Load
from wcache.paths import RankId
from wcache.protocol.messages import LoadFailed, Progress

pytestmark = pytest.mark.unit


def under_way() -> Load:
    return Load(peer=1, pid=7, generation=2, how="loaded")


def test_a_load_is_told_by_its_phase_and_its_bytes() -> None:
    load = under_way()
    assert load.in_words() == "start"
    load.advance(Progress(phase="read", done_bytes=1 << 20, total_bytes=4 << 20))
    assert load.in_words() == "read 1.0 MiB of 4.0 MiB (25 %)"


def test_a_load_that_stands_still_is_told_as_such_until_it_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = under_way()
    said = Progress(phase="read", done_bytes=1 << 20, total_bytes=4 << 20)
    load.advance(said)
    begun = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: begun + 59)
    load.advance(said)  # the same again is no progress
    assert "no progress" not in load.in_words()
    monkeypatch.setattr(time, "monotonic", lambda: begun + 150)
    assert load.in_words().endswith("(25 %), no progress of pid 7 for 2 min")
    load.advance(Progress(phase="read", done_bytes=2 << 20, total_bytes=4 << 20))
    assert load.in_words() == "read 2.0 MiB of 4.0 MiB (50 %)"


def test_what_mends_a_failed_load_names_the_instance() -> None:
    failed = LoadFailed(message="no room", hint="make some, then: wcache up")
    assert words.why(failed, RankId("a", 3)) == "no room (make some, then: wcache up --instance a)"
    assert words.why(failed, RankId("", 3)) == "no room (make some, then: wcache up)"
    assert words.why(LoadFailed(message="no room"), RankId("a", 3)) == "no room"
