"""Real daemons as processes, and the part of a supervisor that a test plays for them."""

import array
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.places import Places

PATIENCE_S = 60.0


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Returns once ``condition()`` holds; fails the test when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not in {timeout_s:g} s: {what}")
        time.sleep(0.01)


def end(process: "subprocess.Popen[bytes]", how: signal.Signals = signal.SIGKILL) -> int:
    """Ends a child of this process by its pid and waits for it."""
    if process.poll() is None:
        process.send_signal(how)
    return process.wait(PATIENCE_S)


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def settled_files(pid: int) -> int:
    """Open files of ``pid`` once connections that have just ended are closed there too."""
    seen, since = open_files(pid), time.monotonic()
    while time.monotonic() - since < 0.1:
        time.sleep(0.01)
        if (now := open_files(pid)) != seen:
            seen, since = now, time.monotonic()
    return seen


class Store:
    """The notify socket and descriptor store that a supervisor would keep for one daemon."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fds: dict[str, int] = {}
        self.said: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))

    def serve(self, until: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Takes messages in until ``until()`` holds; fails the test when it does not in time."""
        deadline = time.monotonic() + timeout_s
        while not until():
            if time.monotonic() > deadline:
                pytest.fail(f"the daemon said only {self.said}")
            if select.select([self._socket], [], [], 0.02)[0]:
                self._take()

    def _take(self) -> None:
        data, ancillary, _, _ = self._socket.recvmsg(8192, socket.CMSG_SPACE(256 * 4))
        fds = array.array("i")
        for _, _, payload in ancillary:
            fds.frombytes(payload)
        lines = data.decode().split("\n")
        name = next((line[7:] for line in lines if line.startswith("FDNAME=")), "")
        if "FDSTORE=1" in lines:
            self.fds[name] = fds[0]
        elif "FDSTOREREMOVE=1" in lines:
            for fd in [self.fds.pop(name)] if name in self.fds else []:
                os.close(fd)
        else:
            for fd in fds:
                os.close(fd)
        self.said += [line for line in lines if line != "WATCHDOG=1"]

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()
        self._socket.close()
        self.path.unlink(missing_ok=True)


# Run by a fresh interpreter: puts the descriptors at 3 and up, sets LISTEN_PID to the pid that exec
# keeps, and becomes the daemon. Popen can do neither.
_BECOME_DAEMON = """
import fcntl, os, sys
rank, fds = sys.argv[1], [int(number) for number in sys.argv[2:]]
for place, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 1000) for fd in fds], start=3):
    os.dup2(fd, place)
os.closerange(3 + len(fds), 4096)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, "-m", "wcache.daemon", rank])
"""


def start_daemon(
    places: Places,
    rank: str = "0",
    *,
    store: Store | None = None,
    environment: dict[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """``python -m wcache.daemon RANK`` with ``store``'s descriptors handed over."""
    env = {**os.environ, **places.environment, **(environment or {})}
    fds: tuple[int, ...] = ()
    if store is not None:
        fds = tuple(store.fds.values())
        env["NOTIFY_SOCKET"] = str(store.path)
        env["LISTEN_FDS"] = str(len(fds))
        env["LISTEN_FDNAMES"] = ":".join(store.fds)
    with daemon_log(places, rank).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _BECOME_DAEMON, rank, *map(str, fds)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=fds,
        )


def daemon_log(places: Places, rank: str = "0") -> Path:
    return places.root / f"daemon.{rank}.log"
