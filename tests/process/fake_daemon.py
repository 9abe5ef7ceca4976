"""Plays a rank's daemon: keeps to the notify protocol as far as its orders say.

``python fake_daemon.py RANK``; orders are FAKE_DIR/RANK.json, read at each start, and each file
FAKE_DIR/RANK.do, obeyed and removed while it runs. Each start adds a line to FAKE_DIR/RANK.starts.
"""

import array
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["FAKE_DIR"])
RANK = sys.argv[1]
WATCHED = ("NOTIFY_SOCKET", "INVOCATION_ID", "LISTEN_", "WATCHDOG_")


def notify(text: str | bytes, fds: list[int] | None = None) -> None:
    data = text if isinstance(text, bytes) else text.encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        try:
            out.sendmsg([data], rights, 0, os.environ["NOTIFY_SOCKET"])
        except (ConnectionError, FileNotFoundError):
            return  # between two supervisors nobody listens, or the socket is not there


def adopted() -> dict[str, int]:
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return {}
    names = os.environ["LISTEN_FDNAMES"].split(":")
    assert len(names) == int(os.environ["LISTEN_FDS"])
    return {name: 3 + index for index, name in enumerate(names)}


def store(held: dict[str, int]) -> None:
    for name, fd in held.items():
        notify(f"FDSTORE=1\nFDPOLL=0\nFDNAME={name}", [fd])


def barrier() -> bool:
    reader, writer = os.pipe()
    notify("BARRIER=1", [writer])
    os.close(writer)
    poll = select.poll()
    poll.register(reader, select.POLLHUP)
    confirmed = bool(poll.poll(5000))
    os.close(reader)
    return confirmed


def record_start(held: dict[str, int]) -> None:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    start = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "fds": {name: os.pread(fd, 1 << 16, 0).decode() for name, fd in held.items()},
        "open": sorted(int(path.name) for path in Path("/proc/self/fd").iterdir()),
        "stdin": str(Path("/proc/self/fd/0").readlink()),
        "blocked": int(status["SigBlk"], 16),
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(WATCHED)
        },
    }
    with (FOLDER / f"{RANK}.starts").open("a") as file:
        file.write(json.dumps(start) + "\n")


class ControlSocket:
    """Welcomes an operator and stores everything again when asked to."""

    def __init__(self, refuses: bool) -> None:
        from wcache.paths import RankId, RankPaths

        self.paths = RankPaths.of(RankId.parse(RANK))
        self.refuses = refuses
        self.paths.folder.mkdir(parents=True, exist_ok=True)
        self.paths.socket.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self.paths.socket))
        self.listener.listen(8)
        self.listener.setblocking(False)

    def serve(self, held: dict[str, int]) -> None:
        from wcache.protocol.control import Channel
        from wcache.protocol.messages import (
            REQUESTS,
            Hello,
            Refused,
            StoreAgain,
            Stored,
            Welcome,
            decode_body,
        )

        try:
            connection, _ = self.listener.accept()
        except BlockingIOError:
            return
        connection.settimeout(5)
        channel = Channel(connection)
        try:
            while True:
                message = decode_body(channel.receive_body(), REQUESTS)
                if isinstance(message, Hello):
                    who = self.paths.id
                    channel.send(Welcome(instance=who.instance, rank=who.rank, pid=os.getpid()))
                elif isinstance(message, StoreAgain) and not self.refuses:
                    store(held)
                    notify("READY=1\nSTATUS=stored again")
                    channel.send(Stored(count=len(held)))
                else:
                    channel.send(Refused(reason="bad_request", message="not known here"))
        except (OSError, TimeoutError):
            channel.close()


def obey(order: dict[str, Any], held: dict[str, int]) -> object:
    """One order from FAKE_DIR/RANK.do; what it returns is written to RANK.done."""
    fds = [os.memfd_create("order") for _ in range(order.get("fds", 0))]
    if "say" in order:
        notify(order["say"], fds)
    elif "hex" in order:
        notify(bytes.fromhex(order["hex"]), fds)
    elif "child_says" in order:
        if os.fork() == 0:
            notify(order["child_says"], fds)
            os._exit(0)
        os.wait()
    elif "orphans" in order:
        if os.fork() == 0:
            for _ in range(order["orphans"]):
                if os.fork() == 0:
                    time.sleep(0.5)
                    os._exit(0)
            os._exit(0)
        os.wait()
    elif "exit" in order:
        os._exit(order["exit"])
    for fd in fds:
        os.close(fd)
    return barrier()


def main() -> None:
    orders = json.loads((FOLDER / f"{RANK}.json").read_text())
    mode = orders.get("mode", "ready")
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    # As the real one does.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = adopted()
    record_start(held)
    if not held:
        for name, content in orders.get("store", {}).items():
            held[name] = os.memfd_create(name)
            os.write(held[name], content.encode())
        store(held)
    if mode == "exit":
        os._exit(orders["code"])
    control = ControlSocket(orders.get("refuses", False)) if orders.get("control") else None
    assert barrier()
    if mode != "silent":
        notify("READY=1\nSTATUS=ready to serve")
    order, done = FOLDER / f"{RANK}.do", FOLDER / f"{RANK}.done"
    while not stopping or mode == "deaf":
        if mode != "hang":
            notify("WATCHDOG=1")
        if control:
            control.serve(held)
        if order.exists():
            text = order.read_text()
            # First, or an order that ends this process would be obeyed by the next one again.
            order.unlink()
            done.write_text(json.dumps(obey(json.loads(text), held)))
        time.sleep(0.02)
    notify("STOPPING=1")
    if slow := orders.get("slow_stop"):
        time.sleep(slow)


main()
