"""A supervisor of fake daemons for one test, and everything that the test asks about it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.places import Places
from tests.processes import PATIENCE_S, open_files, wait_for
from wcache.supervise.direct.client import DirectSupervisor
from wcache.supervise.interface import UnitReport

HERE = Path(__file__).parent
LAUNCH = (sys.executable, str(HERE / "supervisor_launcher.py"))
SLABS = {"g1.slab.0": "first weights", "g1.slab.1": "second weights", "g1.manifest": "{}"}
# Long enough for a loaded machine, short where a test waits for the time to be over.
TIMING = {"backoff_first_s": 0.02, "backoff_limit_s": 0.1, "lock_wait_s": 0.3, "idle_s": 60.0}


class Supervised:
    """Its environment must be in force already: see the fixture ``supervised``."""

    def __init__(self, places: Places, folder: Path) -> None:
        self.places = places
        self.folder = folder
        self.commands = DirectSupervisor("", launch=LAUNCH)
        self._parents: list[subprocess.Popen[bytes]] = []

    def order(self, rank: int = 0, **orders: Any) -> None:
        """What the rank's fake daemon does at its next start."""
        (self.folder / f"{rank}.json").write_text(json.dumps({"store": SLABS, **orders}))

    def order_loader(self, rank: int = 0, **orders: Any) -> None:
        (self.folder / f"{rank}.loader.json").write_text(json.dumps(orders))

    def timing(self, **times: float) -> None:
        """For supervisors that are launched from here on."""
        os.environ["FAKE_TIMING"] = json.dumps({**TIMING, **times})

    def launch(self, *arguments: str, around: tuple[str, ...] = ()) -> "subprocess.Popen[bytes]":
        """A supervisor in the foreground that takes commands; ``around`` is put in front of it."""
        reader, writer = os.pipe()
        with (self.folder / "parent.log").open("ab") as log:
            parent = subprocess.Popen(
                [*around, *LAUNCH, "--ready-fd", str(writer), *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(writer,),
            )  # fmt: skip
        self._parents.append(parent)
        os.close(writer)
        with os.fdopen(reader, "rb") as ready:
            assert ready.read(1), self.log()
        return parent

    def exit_code(self) -> int:
        """Of the supervisor that was launched last, which has ended or is about to."""
        return self._parents[-1].wait(PATIENCE_S)

    def log(self) -> str:
        return (self.folder / "parent.log").read_text()

    def show(self, rank: int = 0) -> UnitReport:
        return self.commands.show([rank])[rank]

    def open_files(self, pid: int) -> int:
        """Of the supervisor ``pid``, once it has ended the conversation of the last command.

        Counted at any other time the number would have one too many every now and then.
        """
        path = str(self.places.instance().supervisor_socket)

        def at_rest() -> bool:
            # The sixth column is the state; 03 is connected, which a listener never is.
            sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
            return not any(columns[-1] == path and columns[5] == "03" for columns in sockets)

        wait_for(at_rest, "the supervisor has ended its conversations")
        return open_files(pid)

    def starts(self, rank: int = 0) -> list[dict[str, Any]]:
        return _lines(self.folder / f"{rank}.starts")

    def loads(self, rank: int = 0) -> list[dict[str, Any]]:
        return _lines(self.folder / f"{rank}.loads")

    def tell(self, rank: int = 0, **order: Any) -> object:
        """Has the running fake daemon obey one order; returns the outcome."""
        done = self.folder / f"{rank}.done"
        done.unlink(missing_ok=True)
        draft = self.folder / f"{rank}.draft"
        draft.write_text(json.dumps(order))
        draft.rename(self.folder / f"{rank}.do")
        wait_for(lambda: done.exists() and bool(done.read_text()), f"order {order}")
        return json.loads(done.read_text())

    def up(self, rank: int = 0) -> UnitReport:
        """Starts the rank and waits until it is ready and its loader has ended."""
        self.commands.start([rank])
        return self.wait_active(rank)

    def wait_active(self, rank: int = 0, *, starts: int | None = None) -> UnitReport:
        def ready() -> bool:
            unit = self.show(rank)
            done = unit.state == "active" and unit.loader != "running"
            return done and (starts is None or len(self.starts(rank)) == starts)

        wait_for(ready, f"rank {rank} is active")
        return self.show(rank)

    def wait_state(self, state: str, rank: int = 0) -> UnitReport:
        wait_for(lambda: self.show(rank).state == state, f"rank {rank} is {state}")
        return self.show(rank)

    def kill(self, rank: int = 0, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.starts(rank)[-1]["pid"], number)

    def close(self) -> None:
        """Ends supervisors first, so that they restart nobody."""
        for parent in self._parents:
            if parent.poll() is None:
                parent.kill()
            parent.wait(PATIENCE_S)
        _end_by_argument(self.places, b"supervisor_launcher.py")
        _end_by_argument(self.places, b"fake_daemon.py", b"fake_loader.py")


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _end_by_argument(places: Places, *scripts: bytes) -> None:
    """Ends this test's processes that were left by others: known by its folder and their script."""
    mine = os.fsencode(places.root)
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            fd = os.pidfd_open(int(folder.name))
            try:
                command = (folder / "cmdline").read_bytes()
                environment = (folder / "environ").read_bytes()
                if mine in environment and any(script in command for script in scripts):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            finally:
                os.close(fd)


@pytest.fixture
def supervised(places: Places, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervised]:
    """A supervisor to be, with two ranks' orders given."""
    folder = places.root / "fake"
    folder.mkdir()
    monkeypatch.setenv("FAKE_DIR", str(folder))
    monkeypatch.setenv("FAKE_TIMING", json.dumps(TIMING))
    # The scripts lie beside the tests and import wcache from where this process has it.
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent.parent))
    made = Supervised(places, folder)
    made.order(0)
    made.order(1)
    yield made
    made.close()
