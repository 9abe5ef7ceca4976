"""What a service says to its supervisor, parsed as systemd parses it (sd_notify(3)). Pure."""

from dataclasses import dataclass
from typing import Literal

from wcache.errors import ProtocolError

MAX_MESSAGE_BYTES = 4096
MAX_NAME = 255
DEFAULT_NAME = "stored"
# Longer than anybody waits; keeps sums with clock times within what a float tells apart.
_MAX_USEC = 30 * 24 * 3600 * 10**6

Watchdog = Literal["", "ping", "trigger"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NotifyMessage:
    """One datagram. MAINPID=, ERRNO=, EXIT_STATUS= and what is unknown are passed over."""

    ready: bool = False
    stopping: bool = False
    barrier: bool = False
    status: str | None = None
    """One line that can be printed."""
    watchdog: Watchdog = ""
    watchdog_s: float | None = None
    """A new watchdog period; 0 turns it off."""
    extend_s: float | None = None
    store: bool = False
    remove: bool = False
    name: str | None = None
    """FDNAME=; None when it is absent or not a name."""

    @property
    def store_name(self) -> str:
        return self.name or DEFAULT_NAME


def parse(data: bytes) -> NotifyMessage:
    """Raises :class:`ProtocolError` when ``data`` is not a list of assignments."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of more than {MAX_MESSAGE_BYTES} bytes")
    if b"\0" in data[:-1]:
        raise ProtocolError("message with a zero byte in it")
    values: dict[str, str] = {}
    for line in data.removesuffix(b"\0").decode(errors="replace").split("\n"):
        key, equals, value = line.partition("=")
        if equals:
            # As in systemd the first of several counts.
            values.setdefault(key, value)
    barrier = values.get("BARRIER") == "1"
    if barrier and len(values) > 1:
        raise ProtocolError("BARRIER=1 with other assignments")
    watchdog: dict[str, Watchdog] = {"1": "ping", "trigger": "trigger"}
    name = values.get("FDNAME")
    return NotifyMessage(
        ready=values.get("READY") == "1",
        stopping=values.get("STOPPING") == "1",
        barrier=barrier,
        status=_printable(values["STATUS"]) if "STATUS" in values else None,
        watchdog=watchdog.get(values.get("WATCHDOG", ""), ""),
        watchdog_s=_seconds(values.get("WATCHDOG_USEC")),
        extend_s=_seconds(values.get("EXTEND_TIMEOUT_USEC")),
        store=values.get("FDSTORE") == "1",
        remove=values.get("FDSTOREREMOVE") == "1",
        name=name if name and is_name(name) else None,
    )


def is_name(name: str) -> bool:
    """True for what LISTEN_FDNAMES= can carry: printable ASCII without a colon."""
    return len(name) <= MAX_NAME and all(" " <= letter <= "~" and letter != ":" for letter in name)


def _seconds(microseconds: str | None) -> float | None:
    if microseconds is None or not (microseconds.isascii() and microseconds.isdigit()):
        return None
    return min(int(microseconds[:20]), _MAX_USEC) / 1e6


def _printable(text: str) -> str:
    """A status is shown on terminals, which must not obey it."""
    return "".join(letter if letter.isprintable() else " " for letter in text).strip()
