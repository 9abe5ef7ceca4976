"""Asks an engine's API for one token: only that shows that it serves."""

import http.client
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from wcache.engines.interface import Probe
from wcache.errors import WcacheError

PERIOD_S = 0.1
# The first token of a large model on a cold GPU may compile kernels.
TOKEN_TIMEOUT_S = 300.0
MAX_ANSWER_BYTES = 1 << 20

_ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""What a server listens on when it listens on every address, and where it is then reached."""


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


class Prober:
    """Probes in a thread of its own, since an answer may take minutes."""

    def __init__(self, probe: Probe, told: Callable[[str], None]) -> None:
        """``told`` is called from that thread, with ``port`` and then with ``first token``."""
        self._probe = probe
        self._told = told
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wcache-probe", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the probing; the thread may wait for an answer for a while, and then says nothing.

        It is a daemon thread: it keeps no process alive.
        """
        self._ended.set()

    def _run(self) -> None:
        while not _connects(self._probe):
            if self._ended.wait(PERIOD_S):
                return
        self._told("port")
        while not self._ended.is_set():
            begun = time.monotonic()
            if has_token(self._probe):
                if not self._ended.is_set():
                    self._told("first token")
                return
            self._ended.wait(max(0.0, PERIOD_S - (time.monotonic() - begun)))


def _connects(probe: Probe) -> bool:
    try:
        with socket.create_connection((_ANY.get(probe.host, probe.host), probe.port), timeout=1.0):
            return True
    except OSError:
        return False


def has_token(probe: Probe) -> bool:
    """True when the API answered with a completion; False for anything else it may say so far."""
    connection = http.client.HTTPConnection(
        _ANY.get(probe.host, probe.host), probe.port, timeout=TOKEN_TIMEOUT_S
    )
    headers = {"Content-Type": "application/json", **probe.headers}
    try:
        connection.request("POST", probe.path, msgspec.json.encode(probe.body), headers)
        answer = connection.getresponse()
        data = answer.read(MAX_ANSWER_BYTES)
        if answer.status != http.HTTPStatus.OK:
            return False
        return bool(msgspec.json.decode(data, type=_Completion).choices)
    except (OSError, http.client.HTTPException, msgspec.DecodeError, UnicodeDecodeError):
        return False
    finally:
        connection.close()
