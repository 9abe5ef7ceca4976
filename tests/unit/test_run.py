"""The timeline, the outcome and the events of a run: what is made of what an engine tells."""

from pathlib import Path

import pytest

from wcache.engines.orders import EVENTS, MAX_EVENT_BYTES, Event, Orders, report
from wcache.errors import UsageError
from wcache.run.outcome import count, counts, outcome_of
from wcache.run.timeline import (
    KEPT_RECORDS,
    Record,
    Timeline,
    load,
    read_events,
    records,
    save,
    steps,
    table,
)

pytestmark = pytest.mark.unit


def event(name: str, **fields: object) -> Event:
    return Event(at=1.0, pid=1, name=name, **fields)  # type: ignore[arg-type]  # fields vary


def record(**fields: object) -> Record:
    told = {
        "began": 0.0, "engine": "", "command": ("x",), "mode": "client", "instance": "",
        "outcome": None, "reason": "", "phases": (), "steps": (), "ready_s": None,
    }  # fmt: skip
    return Record(**{**told, **fields})  # type: ignore[arg-type]  # fields vary


def test_a_phase_lasts_from_the_end_of_the_one_before() -> None:
    line = Timeline()
    line.end("imports", 2.0, "log")
    line.end("weights", 3.0, "event")
    line.end("first token", 7.0, "probe")
    assert [(p.name, p.begin_s, p.end_s) for p in line.phases()] == [
        ("imports", 0.0, 2.0), ("weights", 2.0, 3.0), ("first token", 3.0, 7.0),
    ]  # fmt: skip
    assert line.last == "first token"


def test_of_several_ranks_the_last_one_ends_a_phase() -> None:
    line = Timeline()
    line.end("weights", 3.0, "log")
    line.end("weights", 4.0, "log")
    assert [phase.end_s for phase in line.phases()] == [4.0]


def test_a_phase_that_comes_again_after_a_later_one_is_none_of_the_start() -> None:
    line = Timeline()
    line.end("weights", 3.0, "log")
    line.end("port", 5.0, "probe")
    line.end("weights", 6.0, "log")
    assert [(phase.name, phase.end_s) for phase in line.phases()] == [("weights", 3.0), ("port", 5)]


def test_an_event_that_is_heard_of_late_still_counts_for_when_it_was() -> None:
    line = Timeline()
    line.end("capture", 5.0, "log")
    line.end("weights", 4.0, "event")
    assert [phase.name for phase in line.phases()] == ["weights", "capture"]


def test_the_table_shows_the_slowest_rank_of_each_step() -> None:
    line = Timeline()
    line.end("weights", 3.0, "event")
    told = steps([event("map", seconds=0.1, rank=0), event("map", seconds=0.2, rank=1)])
    lines = table(record(phases=line.phases(), steps=told)).lines()
    assert lines[1].split() == ["weights", "3.000", "s", "3.000", "s", "event"]
    assert lines[2].split() == ["-", "map", "0.200", "s", "-", "event"]


def test_the_steps_of_one_level_do_not_count_a_second_twice() -> None:
    line = Timeline()
    line.end("weights", 0.4, "event")
    told = steps([event("fetch", seconds=0.1), event("build", seconds=0.2),
                  event("attach", seconds=0.3)])  # fmt: skip
    lines = table(record(phases=line.phases(), steps=told)).lines()
    names = [text.partition("0.")[0].strip() for text in lines[2:]]
    assert names == ["- attach", "- - fetch", "- - build"]


def test_one_rank_that_read_the_disk_makes_a_miss() -> None:
    told = [
        event("outcome", outcome="hit", rank=0, reason="attached"),
        event("outcome", outcome="miss", rank=1, reason="no daemon"),
    ]
    assert outcome_of(told) == ("miss", "rank 1: no daemon")


def test_ranks_with_one_reason_are_told_together() -> None:
    told = [event("outcome", outcome="hit", rank=rank, reason="attached") for rank in (1, 0)]
    assert outcome_of(told) == ("hit", "ranks 0, 1: attached")


def test_a_reason_that_names_its_rank_is_told_as_it_is() -> None:
    """Another rank's name is part of the reason."""
    reasons = {0: "rank draft:0 holds other weights", 1: "rank 10 is not up"}
    told = [
        event("outcome", outcome="miss", rank=rank, reason=why) for rank, why in reasons.items()
    ]
    assert outcome_of(told)[1] == "rank draft:0 holds other weights; rank 1: rank 10 is not up"


def test_outcomes_are_counted_over_runs_and_a_damaged_file_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "outcomes"
    count(path, "hit")
    count(path, "hit")
    count(path, "miss")
    assert counts(path) == {"hit": 2, "miss": 1}
    path.write_bytes(b"{")
    count(path, "hit")
    assert counts(path) == {"hit": 1}


def test_events_go_through_a_file_and_what_is_none_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(b'not json\n{"at": "x"}\n')
    report(Orders(events=path), "bind", seconds=0.5, rank=2)
    assert [(one.name, one.seconds, one.rank) for one in read_events(path)] == [("bind", 0.5, 2)]


def test_a_reason_of_any_length_is_one_bounded_line(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.touch()
    report(Orders(events=path), "outcome", outcome="miss", reason="é\n" * 100_000)
    data = path.read_bytes()
    assert data.count(b"\n") == 1
    assert len(data) <= MAX_EVENT_BYTES


def test_no_engine_fails_for_an_event_that_can_not_be_told(tmp_path: Path) -> None:
    report(Orders(events=tmp_path / "gone" / "events"), "bind")
    report(Orders(), "bind")


def test_orders_come_back_as_they_were_given(tmp_path: Path) -> None:
    orders = Orders(instance="draft", on_mismatch="fail", events=tmp_path)
    assert Orders.given(orders.environment()) == orders
    assert Orders.given({}) == Orders()
    assert EVENTS not in Orders().environment()


def test_an_order_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="WCACHE_ON_MISMATCH is 'maybe'"):
        Orders.given({"WCACHE_ON_MISMATCH": "maybe"})


def test_records_come_back_and_the_oldest_go(tmp_path: Path) -> None:
    for number in range(KEPT_RECORDS + 3):
        save(record(began=float(number)), tmp_path, f"{number:04}")
    found = records(tmp_path)
    assert [path.stem for path in found] == [f"{n:04}" for n in range(3, KEPT_RECORDS + 3)]
    assert load(found[0]) == record(began=3.0)


def test_a_file_that_is_no_record_is_none(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text("{}")
    assert load(tmp_path / "1.json") is None
    assert load(tmp_path / "2.json") is None
