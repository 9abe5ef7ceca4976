"""Fixtures and questions for tests that talk to a real daemon."""

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.places import Places
from tests.processes import Store, daemon_log, end, start_daemon
from tests.publishing import publish
from wcache.protocol.control import Control
from wcache.protocol.messages import AskReport, Attach, Attached, Report

Daemon = subprocess.Popen[bytes]
Start = Callable[..., Daemon]


@pytest.fixture
def store(places: Places) -> Iterator[Store]:
    made = Store(places.root / "notify")
    yield made
    made.close()


@pytest.fixture
def start(places: Places, store: Store) -> Iterator[Start]:
    """Starts daemons that keep their descriptors in ``store`` and ends them afterwards."""
    running: list[Daemon] = []

    def begin(*, ready: bool = True, **options: str) -> Daemon:
        store.said.clear()
        process = start_daemon(places, store=store, **options)  # type: ignore[arg-type]  # every option is a str
        running.append(process)
        if ready:
            store.serve(lambda: "READY=1" in store.said or process.poll() is not None)
            assert process.poll() is None, daemon_log(places).read_text()
        return process

    yield begin
    for process in running:
        end(process)


def report(places: Places) -> Report:
    with Control.connect(places.rank(), "operator") as control:
        return control.request(AskReport(), Report)


def attach(control: Control) -> tuple[Attached, list[int]]:
    answer = control.request(Attach(), Attached)
    return answer, control.channel.take_fds(1 + len(answer.slabs))


def published(places: Places, store: Store, slabs: list[bytes]) -> None:
    """Publishes while playing the supervisor, whose confirmation the daemon waits for."""
    done = threading.Event()

    def work() -> None:
        publish(places.rank(), slabs)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    store.serve(done.is_set)
    thread.join()


def connects(places: Places) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(places.rank().socket)) == 0
