"""Asks an engine's API for one token: only that shows that it serves."""

import http
import http.client
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from wcache.engines.interface import Probe
from wcache.errors import WcacheError
from wcache.machine.processes import listens

PERIOD_S = 0.1
REFUSED_S = 5.0
"""For so long an API has to refuse before that is its last word: its routes may come one by one."""
# The first token of a large model on a cold GPU may compile kernels.
TOKEN_TIMEOUT_S = 300.0
MAX_ANSWER_BYTES = 1 << 20

_ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""What a server listens on when it listens on every address, and where it is then reached."""


_NOT_YET = (
    http.HTTPStatus.REQUEST_TIMEOUT,
    http.HTTPStatus.TOO_EARLY,
    http.HTTPStatus.TOO_MANY_REQUESTS,
)


class _Choice(msgspec.Struct):
    text: str | None = None
    message: object = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


def check_is_free(probe: Probe) -> None:
    """Raises :class:`WcacheError` when the engine's port is in use.

    Whoever listens there would be taken for the engine.
    """
    if _connects(probe):
        raise WcacheError(
            f"port {probe.port} is in use already",
            hint="stop what listens there (ss -ltnp shows it), or give the engine another --port",
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine's API made of the request for a token."""

    has_token: bool
    refusal: str = ""
    """Why there will never be one: the API serves, and has no completions. Empty otherwise."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the probing found, and when."""

    what: Literal["port", "first token", "refusal"]
    at: float
    """By :func:`time.monotonic`."""
    reason: str = ""
    """Of a refusal."""


class Prober:
    """Probes in a thread of its own, since an answer may take minutes."""

    def __init__(self, probe: Probe, engine: int, told: Callable[[Told], None]) -> None:
        """``told`` is called from that thread, for the port and then for the token.

        ``engine`` is the process that was started: an answer of any process but that and its own
        ones is none of the engine's.
        """
        self._probe = probe
        self._engine = engine
        self._told = told
        self._ended = threading.Event()
        self.stranger = False
        """Somebody else listens on the engine's port."""
        self._thread = threading.Thread(target=self._run, name="wcache-probe", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the probing; the thread may wait for an answer for a while, and then says nothing.

        It is a daemon thread: it keeps no process alive.
        """
        self._ended.set()

    def _run(self) -> None:
        while not self._is_there():
            if self._ended.wait(PERIOD_S):
                return
        self._tell(Told("port", time.monotonic()))
        refused_since: float | None = None
        while not self._ended.is_set():
            begun = time.monotonic()
            answer = ask(self._probe)
            now = time.monotonic()
            if answer.has_token:
                self._tell(Told("first token", now))
                return
            if not answer.refusal:
                refused_since = None
            elif refused_since is None:
                refused_since = now
            elif now - refused_since > REFUSED_S:
                self._tell(Told("refusal", now, answer.refusal))
                return
            self._ended.wait(max(0.0, PERIOD_S - (now - begun)))

    def _is_there(self) -> bool:
        """Whoever listens may have taken the port while the engine was still loading."""
        if not _connects(self._probe):
            return False
        # Where that can not be seen (other rights, another namespace) there is no reason to doubt.
        self.stranger = listens(self._engine, self._probe.port) is False
        return not self.stranger

    def _tell(self, found: Told) -> None:
        if not self._ended.is_set():
            self._told(found)


def _connects(probe: Probe) -> bool:
    try:
        with socket.create_connection((_ANY.get(probe.host, probe.host), probe.port), timeout=1.0):
            return True
    except OSError:
        return False


def ask(probe: Probe) -> Answer:
    """Asks the API for a completion of one token."""
    connection = http.client.HTTPConnection(
        _ANY.get(probe.host, probe.host), probe.port, timeout=TOKEN_TIMEOUT_S
    )
    headers = {"Content-Type": "application/json", **probe.headers}
    try:
        connection.request("POST", probe.path, msgspec.json.encode(probe.body), headers)
        answer = connection.getresponse()
        data = answer.read(MAX_ANSWER_BYTES)
        if answer.status != http.HTTPStatus.OK:
            return Answer(False, _refusal(probe, answer.status))
        return Answer(bool(msgspec.json.decode(data, type=_Completion).choices))
    except (OSError, http.client.HTTPException, msgspec.DecodeError, UnicodeDecodeError):
        return Answer(False)
    finally:
        connection.close()


def _refusal(probe: Probe, status: int) -> str:
    """Empty for a status that another try may change."""
    if not 400 <= status < 500 or status in _NOT_YET:
        return ""
    return f"{probe.path} answers {status} {http.client.responses.get(status, '')}".rstrip()
