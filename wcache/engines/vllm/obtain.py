"""What a starting vLLM gets of its rank's daemon, and how long it waits for that; without vLLM."""

import logging
import time
from typing import Any

from wcache.client import Attachment, attach
from wcache.engines.vllm.fill import Claim, claim
from wcache.engines.vllm.wanted import Wanted
from wcache.errors import MismatchError, NotReadyError, TryAgainError
from wcache.paths import RankId, RankPaths
from wcache.protocol.control import COMES_BACK_S, EndedDaemonError, RefusedError
from wcache.protocol.messages import Report
from wcache.ranks import ask_when_back

# Below vLLM's own logger, whose handlers are the engine's log.
log = logging.getLogger("vllm.wcache")

_PUBLISHER_WAIT_S = 3600.0
_PAUSE_S = 0.2

# vLLM makes one loader to ask how much is held, and another one to load: what the first has waited
# for in vain, the second does not wait for again.
_stayed_away: set[RankId] = set()


def settled(wanted: Wanted) -> Report | None:
    """What the rank's daemon holds, once no other engine is on the way to publish it.

    vLLM compares the GPU's memory before its load with that after it: what somebody else takes in
    between would be counted as this engine's (vllm #55827). A daemon that is being restarted is
    waited for as :func:`attach` does it: what it holds would else be counted as free. None when
    there is none; :func:`obtain` does not wait for it a second time then.
    """
    deadline = time.monotonic() + _PUBLISHER_WAIT_S
    while True:
        found = ask_when_back(RankPaths.of(wanted.rank), COMES_BACK_S)
        if found is None:
            _stayed_away.add(wanted.rank)
            return None
        _stayed_away.discard(wanted.rank)
        if found.serving is not None or found.progress is None or time.monotonic() > deadline:
            return found
        time.sleep(_PAUSE_S)


def obtain(wanted: Wanted, model_config: Any) -> Attachment | Claim:
    """An attachment, or the right to publish; waits while another engine publishes.

    Raises :class:`wcache.errors.WcacheError` that says why there is neither.
    """
    deadline = time.monotonic() + _PUBLISHER_WAIT_S
    comes_back_s = 0.0 if wanted.rank in _stayed_away else COMES_BACK_S
    _stayed_away.discard(wanted.rank)  # of this start: the next one waits anew
    waits = False
    while True:
        try:
            return attached(wanted, comes_back_s)
        except NotReadyError as error:
            not_ready = error
        comes_back_s = COMES_BACK_S  # it is there: should it end from now on, that is another time
        try:
            if (claimed := claim(wanted, model_config)) is not None:
                return claimed
        except (TryAgainError, EndedDaemonError) as error:
            # Of one that has ended since, the next question waits for another.
            if time.monotonic() > deadline:
                raise
            if not waits:
                log.info("wcache: waiting to attach: %s", error.message)
            waits = True
        except RefusedError:
            raise not_ready from None  # a loader fills it, and has not, or could not
        time.sleep(_PAUSE_S)


def attached(wanted: Wanted, comes_back_s: float = COMES_BACK_S) -> Attachment:
    """As :func:`attach`, with what an operator of vLLM can do about what does not fit."""
    rank = wanted.rank
    try:
        return attach(
            rank=rank.rank, instance=rank.instance, wanted=wanted.fingerprint,
            comes_back_s=comes_back_s,
        )  # fmt: skip
    except MismatchError as error:
        if [one.field for one in error.differences] == ["device_uuid"]:
            error.hint = "wcache run shows vllm the GPUs in the order of the ranks"
        if ("engine", "unknown") not in ((one.field, one.cached) for one in error.differences):
            raise
        raise MismatchError(
            f"rank {rank} holds tensors as the checkpoint has them, which vllm fuses and lays out"
            f" in its own way: {error.message}",
            differences=error.differences,
            hint="wcache up --instance NAME --model … --loader publish has the first engine of that"
            " instance publish others beside them",
        ) from None
