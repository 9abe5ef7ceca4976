"""What every adapter tells of one load, and when it may read the disk instead of the cache."""

import logging

import torch

from wcache.client import Attachment
from wcache.engines.orders import Orders, Outcome, report
from wcache.errors import MismatchError, OutOfMemoryError, WcacheError
from wcache.hints import for_instance
from wcache.memory.available import available_bytes
from wcache.paths import RankId
from wcache.units import size


class Account:
    """One load of a rank's weights by an engine: its steps, and its outcome."""

    def __init__(self, orders: Orders, rank: RankId, log: logging.Logger) -> None:
        """``log`` is where the engine's operator looks."""
        self._orders = orders
        self._rank = rank
        self._log = log

    def told(self, step: str, seconds: float) -> None:
        report(self._orders, step, seconds=seconds, rank=self._rank.rank)

    def end(self, outcome: Outcome, reason: str) -> None:
        report(self._orders, "outcome", rank=self._rank.rank, outcome=outcome, reason=reason)

    def hit(self, attachment: Attachment, seconds: float) -> None:
        """The engine computes with what is cached; ``seconds`` are those of all of it."""
        self.told("attach", seconds)
        held = size(attachment.manifest.weight_bytes)
        reason = f"attached to generation {attachment.generation}, {held}"
        self._log.info("wcache: rank %s %s in %.2f s", self._rank, reason, seconds)
        self.end("hit", reason)  # without the time, ranks with the same are told of together

    def missed(
        self, why: WcacheError, *, may_read: bool, room: tuple[torch.device, int] | None
    ) -> None:
        """Notes that nothing fits; returns, loudly, where the disk may be read instead.

        ``room`` is where the model would lie then and about how many bytes that takes; None when
        it is not known. Raises ``why`` when the disk may not be read, and
        :class:`OutOfMemoryError` when the model does not fit beside what is resident.
        """
        outcome: Outcome = "mismatch" if isinstance(why, MismatchError) else "miss"
        self.end(outcome, why.message)
        if not may_read:
            raise why
        if room is not None:
            self._check_room(*room, why)
        hint = f" ({for_instance(why.hint, self._rank.instance)})" if why.hint else ""
        self._log.warning(
            "wcache: %s: rank %s reads its weights from disk, because %s%s",
            outcome.upper(), self._rank, why.message, hint,
        )  # fmt: skip

    def _check_room(self, device: torch.device, needed: int, why: WcacheError) -> None:
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
        if needed > free:
            raise OutOfMemoryError(
                f"rank {self._rank} can not read the disk: that takes {size(needed)} beside what is"
                f" resident on {device}, {size(free)} are free; it was to, because {why.message}",
                hint="wcache down frees what is cached, wcache status shows what that is",
            )
