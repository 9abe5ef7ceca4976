"""The states of a rank: which steps there are, and that there are no others."""

import pytest

from wcache.state import IllegalStepError, RankEvent, RankState, advance, loads, serves

pytestmark = pytest.mark.unit

E, S = RankEvent, RankState


@pytest.mark.parametrize(
    ("start", "events", "end"),
    [
        (S.EMPTY, [E.ADOPTED], S.READY),
        (S.EMPTY, [E.LOAD_BEGUN, E.PUBLISHED], S.READY),
        (S.EMPTY, [E.LOAD_BEGUN, E.LOAD_FAILED], S.FAILED),
        (S.EMPTY, [E.LOAD_BEGUN, E.LOAD_ABANDONED, E.LOAD_BEGUN, E.PUBLISHED], S.READY),
        (S.READY, [E.LOAD_BEGUN, E.PUBLISHED], S.READY),
        (S.READY, [E.LOAD_BEGUN, E.LOAD_FAILED], S.READY),
        (S.FAILED, [E.LOAD_BEGUN, E.PUBLISHED], S.READY),
        (S.READY, [E.VACATED, E.LOAD_BEGUN, E.LOAD_ABANDONED, E.LOAD_BEGUN, E.PUBLISHED], S.READY),
    ],
)
def test_life_of_a_rank(start: RankState, events: list[RankEvent], end: RankState) -> None:
    state = start
    for event in events:
        state = advance(state, event)
    assert state is end


def test_nothing_leads_from_served_weights_to_none() -> None:
    """The invariant of the whole product: no event takes weights away from a serving rank.

    Only an operator does, who has been told what is lost.
    """
    for state in (S.READY, S.STAGING):
        for event in set(RankEvent) - {E.VACATED}:
            try:
                after = advance(state, event)
            except IllegalStepError:
                continue
            assert serves(after), f"{state} + {event}"


def test_two_loads_can_not_be_under_way() -> None:
    for state in RankState:
        if loads(state):
            with pytest.raises(IllegalStepError, match="can not take the event 'load begun'"):
                advance(state, E.LOAD_BEGUN)


def test_weights_are_not_taken_away_during_a_load() -> None:
    with pytest.raises(IllegalStepError):
        advance(S.STAGING, E.VACATED)
