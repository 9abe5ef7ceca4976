"""Asking the daemons of several ranks for the same thing, all at once."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from wcache.errors import NoSuchRankError, TryAgainError, WcacheError
from wcache.paths import InstancePaths, RankPaths
from wcache.protocol.control import Control
from wcache.protocol.messages import Message, Request

# A daemon that was killed is back well within this time.
PATIENCE_S = 30.0
# It may wait for its supervisor's word, several times.
ANSWER_S = 60.0
_PAUSE_S = 0.1
_AT_ONCE = 32

R = TypeVar("R", bound=Message)


def try_all(
    paths: InstancePaths, ranks: Iterable[int], message: Callable[[int], Request], kind: type[R]
) -> tuple[dict[int, R], dict[int, WcacheError]]:
    """Answers and errors by rank. A daemon that is gone or ends is waited for and asked again,
    so that what is asked must be the same when it is asked twice."""
    wanted = list(ranks)
    answers: dict[int, R] = {}
    errors: dict[int, WcacheError] = {}
    if not wanted:
        return answers, errors

    def work(rank: int) -> R | WcacheError:
        try:
            return _ask(paths.rank(rank), message(rank), kind)
        except WcacheError as error:
            return error

    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, len(wanted))) as pool:
        for rank, outcome in zip(wanted, pool.map(work, wanted), strict=True):
            if isinstance(outcome, WcacheError):
                errors[rank] = outcome
            else:
                answers[rank] = outcome
    return answers, errors


def _ask(paths: RankPaths, message: Request, kind: type[R]) -> R:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            with Control.connect(paths, "operator", timeout_s=ANSWER_S) as control:
                return control.request(message, kind)
        except (NoSuchRankError, ConnectionError, TimeoutError) as error:
            if time.monotonic() > deadline:
                raise TryAgainError(
                    f"rank {paths.id} can not be asked: {error}",
                    hint=f"wcache logs {paths.id} says why",
                ) from None
        time.sleep(_PAUSE_S)
