"""What the log says of peers that were refused: a line for each, and a bounded number of them."""

import logging
import time
from collections.abc import Callable

from wcache.difference import Difference
from wcache.protocol.messages import Refused
from wcache.protocol.reports import LeaseReport

log = logging.getLogger(__name__)

# An engine that its supervisor starts again and again is refused every few seconds, for days.
BURST = 20
PERIOD_S = 10.0
"""After so long one more line may be written."""
MAX_DIFFERENCES = 64
MAX_TEXT = 200
"""Characters of what a peer chose: a value of a fingerprint, say."""


class Refusals:
    """Writes lines as long as there are not too many, and counts the others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = float(BURST)
        self._since = clock()
        self._passed_over = 0

    def attach(self, peer: LeaseReport, refusal: Refused) -> None:
        """An engine that waits for weights asks all the time; that it has to wait is no line."""
        if refusal.reason != "not_ready":
            self.line(f"{_name(peer)} was refused: {_reason(refusal)}")

    def line(self, text: str) -> None:
        now = self._clock()
        self._left = min(float(BURST), self._left + (now - self._since) / PERIOD_S)
        self._since = now
        if self._left < 1:
            self._passed_over += 1
            return
        self._left -= 1
        if self._passed_over:
            log.warning("%d refusals before the next one were not logged", self._passed_over)
            self._passed_over = 0
        log.warning("%s", text)


def _name(peer: LeaseReport) -> str:
    pid = f"pid {peer.pid}" if peer.pid else "a process of another pid namespace"
    return f"{pid} (uid {peer.uid}, {peer.command or 'no command'})"


def _reason(refusal: Refused) -> str:
    found = refusal.differences
    if not found:
        return refusal.message
    told = "; ".join(map(_told, found[:MAX_DIFFERENCES]))
    more = f"; and {len(found) - MAX_DIFFERENCES} more" if len(found) > MAX_DIFFERENCES else ""
    return f"it wants other weights: {told}{more}"


def _told(one: Difference) -> str:
    return f"{_shown(one.field)}: cached {_shown(one.cached)}, wanted {_shown(one.wanted)}"


def _shown(text: str) -> str:
    """On one line, whatever the peer has sent."""
    cut = text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"
    return "".join(c if c.isprintable() else "?" for c in cut)
