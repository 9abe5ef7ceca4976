"""Tells the daemon how far a load is, and why it ended when it did not succeed."""

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol, TypeVar

from wcache.errors import WcacheError
from wcache.protocol.messages import MAX_TEXT, LoadFailed, Message, Progress, Request

INTERVAL_S = 0.1

R = TypeVar("R", bound=Message)


class Conversation(Protocol):
    """What a load needs of :class:`wcache.protocol.control.Control`."""

    def request(self, message: Request, kind: type[R], fds: list[int] = ...) -> R:
        """Sends ``message`` with ``fds`` and returns its answer."""

    def tell(self, message: Request) -> None:
        """Sends a message that is not answered."""


class Inquiry(Conversation, Protocol):
    """A conversation in which the daemon may hand descriptors over too."""

    def take_fds(self, count: int) -> list[int]:
        """The descriptors that came with the last answer; the caller owns them."""


class ProgressReport:
    """Sends :class:`Progress`, at most ten a second within a phase."""

    def __init__(self, control: Conversation) -> None:
        self._control = control
        self._phase = ""
        self._total = 0
        self._sent = 0.0

    def begin(self, phase: str, total_bytes: int) -> None:
        self._phase, self._total = phase, total_bytes
        self._send(0)

    def advance(self, done_bytes: int) -> None:
        if done_bytes >= self._total or time.monotonic() - self._sent >= INTERVAL_S:
            self._send(done_bytes)

    def _send(self, done_bytes: int) -> None:
        self._sent = time.monotonic()
        self._control.tell(
            Progress(phase=self._phase, done_bytes=done_bytes, total_bytes=self._total)
        )


@contextlib.contextmanager
def failure_told(control: Conversation) -> Iterator[None]:
    """Tells the daemon why the load failed when the block raises, and lets the exception go on."""
    try:
        yield
    except (ConnectionError, TimeoutError):
        raise  # it is the daemon that is not there
    except WcacheError as error:
        _tell(control, error.message, error.hint)
        raise
    except Exception as error:
        # A bug: the traceback goes to this process's log, and the operator is told where to look.
        _tell(control, f"loader bug: {type(error).__name__}: {error}", "see the loader's log")
        raise


def _tell(control: Conversation, message: str, hint: str) -> None:
    line = " ".join(message.split())
    # The daemon may be what failed; then there is nobody to tell.
    with contextlib.suppress(OSError):
        control.tell(LoadFailed(message=line[:MAX_TEXT], hint=hint[:MAX_TEXT]))
