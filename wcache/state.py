"""The states of a rank and the steps between them. Pure."""

from enum import StrEnum

from wcache.errors import WcacheError


class RankState(StrEnum):
    """``EMPTY -> LOADING -> READY -> STAGING -> READY``, and ``FAILED``."""

    EMPTY = "empty"
    """No weights; waits for a loader or for an engine to publish."""
    LOADING = "loading"
    """A loader is at work and nothing is served yet."""
    READY = "ready"
    """A generation is served."""
    STAGING = "staging"
    """A generation is served while a loader prepares the next one."""
    FAILED = "failed"
    """The first load failed; nothing is served and the daemon is about to end."""


class RankEvent(StrEnum):
    """What can happen to a rank."""

    ADOPTED = "adopted"
    """Descriptors of a whole generation were handed over at start."""
    LOAD_BEGUN = "load begun"
    PUBLISHED = "published"
    LOAD_FAILED = "load failed"
    LOAD_ABANDONED = "load abandoned"
    """The publisher or loader is gone, and another one may begin."""
    VACATED = "vacated"
    """An operator had the served weights freed to make room for others."""


_STEPS: dict[tuple[RankState, RankEvent], RankState] = {
    (RankState.EMPTY, RankEvent.ADOPTED): RankState.READY,
    (RankState.EMPTY, RankEvent.LOAD_BEGUN): RankState.LOADING,
    (RankState.LOADING, RankEvent.PUBLISHED): RankState.READY,
    (RankState.LOADING, RankEvent.LOAD_FAILED): RankState.FAILED,
    (RankState.LOADING, RankEvent.LOAD_ABANDONED): RankState.EMPTY,
    (RankState.READY, RankEvent.LOAD_BEGUN): RankState.STAGING,
    (RankState.STAGING, RankEvent.PUBLISHED): RankState.READY,
    # What was served stays served: a failed reload is a problem to report, not a state.
    (RankState.STAGING, RankEvent.LOAD_FAILED): RankState.READY,
    # The one way from weights to none, and never the daemon's own idea.
    (RankState.READY, RankEvent.VACATED): RankState.EMPTY,
    (RankState.FAILED, RankEvent.LOAD_BEGUN): RankState.LOADING,
}


class IllegalStepError(WcacheError):
    """An event that can not happen in this state."""


def advance(state: RankState, event: RankEvent) -> RankState:
    """The state after ``event``; raises :class:`IllegalStepError` when there is none."""
    try:
        return _STEPS[state, event]
    except KeyError:
        raise IllegalStepError(f"a rank that is {state} can not take the event '{event}'") from None


def serves(state: RankState) -> bool:
    """True when an engine can attach."""
    return state in (RankState.READY, RankState.STAGING)


def loads(state: RankState) -> bool:
    """True while a loader is at work."""
    return state in (RankState.LOADING, RankState.STAGING)
