"""Where the survival run takes place: under a lab's systemd, or under ``wcache supervise``."""

import compileall
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.systemd.lab import (
    MODELS,
    PYTHON,
    SOURCE,
    Done,
    FailedCommand,
    Lab,
    copy_checkout,
    daemon,
    loader,
)
from wcache.paths import InstancePaths
from wcache.ranks import ask
from wcache.supervise.direct.client import DirectSupervisor

# A load of many GiB from a cold disk has to fit in.
COMMAND_S = 400.0
ENGINE_S = 60.0
# Shorter than the unit's own, which an operator may do too.
WATCHDOG = "[Service]\nWatchdogSec=2\n"
# Where a copy of each folder of PYTHONPATH is seen inside the lab.
_FOUND = "/opt/found"
# What the lab has of its own.
_OWN = (Path("/"), Path("/run"), Path("/tmp"))
_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that weights have to outlive."""

    name: str
    act: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    """Done before, and not counted."""
    other_daemon: bool = True
    """Another daemon serves afterwards."""


class Engine:
    """An attached process that says what it has seen."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            first = self._answer()
        except BaseException:
            self.close()
            raise
        self.pid = int(first["pid"])
        """In its own pid namespace."""
        self.digest = str(first["digest"])
        """Of all weights, when it had attached."""

    def say(self) -> dict[str, Any]:
        """``looks`` at all weights, how many of them found some ``changed``, and ``lease``."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise FailedCommand("the engine has ended")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(ENGINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Host(Protocol):
    """A machine, or a part of one, with wcache and a supervisor."""

    supervisor: str
    paths: InstancePaths
    model: str
    """The checkpoint's folder as ranks see it."""
    models: Path
    """What holds it, as this process sees it; it and its siblings are one file system."""
    proc: Path
    """Its /proc."""

    def begin(self) -> None:
        """Until then nothing runs, and afterwards ``wcache up`` may be called."""

    def wcache(self, *arguments: str) -> Done: ...

    def engine(self) -> Engine: ...

    def stored(self) -> int:
        """Descriptors that the supervisor keeps for rank 0."""

    def events(self) -> list[Event]: ...

    def stop(self) -> None:
        """Ends rank 0 as an operator would who wants its weights freed."""

    def start(self) -> None: ...

    def keeps_over_stop(self) -> bool: ...

    def log(self) -> str:
        """What daemon and loader have said last."""

    def close(self) -> None: ...


class LabHost:
    """A systemd of the run's own, with the units as ``wcache install`` writes them."""

    supervisor = "systemd"

    def __init__(self, laid: Path | None) -> None:
        """``laid`` is a folder with a systemd, where the machine has none."""
        if sys.prefix == sys.base_prefix:
            raise FailedCommand("the lab needs the python of a virtual environment")
        found = [Path(folder) for folder in _python_path()]
        inside = [f"{_FOUND}/{number}" for number in range(len(found))]
        variables = {"PYTHONPATH": ":".join((SOURCE, *inside)), **_kept_variables()}
        binds = [*zip(found, inside, strict=True), *((mount, str(mount)) for mount in _mounts())]
        self._lab = Lab(binds=binds, variables=variables, timeout_s=COMMAND_S)
        if laid:
            self._lab.environment["WCACHE_LAB_SYSTEMD"] = str(laid)
        self.models = self._lab.models
        self.model = f"{MODELS}/model"
        _compile(self._lab.source)

    def begin(self) -> None:
        self._lab.up()
        self.paths = self._lab.paths()
        self.proc = self._lab.path("/proc")
        self._lab.install()
        folder = "/etc/systemd/system/wcache@.service.d"
        self._lab.path(folder).mkdir(parents=True)
        self._lab.write(f"{folder}/survival.conf", WATCHDOG)
        self._lab.systemctl("daemon-reload")

    def wcache(self, *arguments: str) -> Done:
        return self._lab.wcache(*arguments)

    def engine(self) -> Engine:
        command = [PYTHON, "-P", f"{SOURCE}/scripts/survival_engine.py"]
        return Engine(self._lab.exec(*self._lab.with_variables(), *command), self._lab.environment)

    def stored(self) -> int:
        return self._lab.stored("")

    def events(self) -> list[Event]:
        return [
            Event(name="systemctl restart", act=self._systemctl("restart", daemon(""))),
            Event(name="kill -9 of the daemon", act=self._signal("KILL")),
            Event(name="SIGSTOP, watchdog abort", act=self._signal("STOP")),
            Event(name="daemon-reload", act=self._systemctl("daemon-reload"), other_daemon=False),
            Event(name="daemon-reexec", act=self._systemctl("daemon-reexec"), other_daemon=False),
            Event(name="kill -9 after reexec", act=self._signal("KILL")),
            Event(name="restart of wcache.target", act=self._systemctl("restart", "wcache.target")),
            Event(name="package anew, restart", prepare=self._upgrade,
                  act=self._systemctl("restart", daemon(""))),
        ]  # fmt: skip

    def stop(self) -> None:
        self._lab.systemctl("stop", daemon(""))

    def start(self) -> None:
        self._lab.systemctl("start", daemon(""))

    def keeps_over_stop(self) -> bool:
        """systemd 254 and newer, for which install has put a drop-in beside the unit."""
        unit = "/usr/local/lib/systemd/system/wcache@.service.d/preserve.conf"
        return self._lab.path(unit).exists()

    def log(self) -> str:
        lab = self._lab
        if not (lab.folder / "lab" / "pid").exists():
            return ""
        nodes = lab.run("bash", "-c", "ls -lR /dev | grep -i nvidia", check=False).stdout
        parts = [f"devices of the lab:\n{nodes or 'none of a GPU'}"]
        for unit in (loader(""), daemon("")):
            said = lab.run("journalctl", "--no-pager", "-n", "60", "-u", unit, check=False).stdout
            parts.append(f"journal of {unit}:\n{said}")
        return "\n".join(parts)

    def close(self) -> None:
        self._lab.close()

    def _systemctl(self, *arguments: str) -> Callable[[], object]:
        return lambda: self._lab.systemctl(*arguments)

    def _signal(self, name: str) -> Callable[[], object]:
        return lambda: self._lab.kill(name, _daemon_pid(self.paths))

    def _upgrade(self) -> None:
        self._lab.put_source()
        _compile(self._lab.source)
        self._lab.wcache("install")


class DirectHost:
    """``wcache supervise`` on this machine, with folders of the run's own."""

    supervisor = "wcache supervise"

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="wcsurv"))
        self.models = self.folder / "models"
        self.models.mkdir()
        self.model = str(self.models / "model")
        self.proc = Path("/proc")
        self._source = self.folder / "source"
        copy_checkout(self._source)
        _compile(self._source)
        # This process asks the supervisor too.
        os.environ.update(
            WCACHE_RUN_DIR=str(self.folder / "run"),
            WCACHE_CONFIG_DIR=str(self.folder / "etc"),
            WCACHE_STATE_DIR=str(self.folder / "state"),
        )
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(self._source), *_python_path())),
        }
        self.paths = InstancePaths.of("")
        self._commands = DirectSupervisor("")
        self._parent: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        log = self.paths.supervisor_log
        log.parent.mkdir(parents=True)
        with log.open("ab") as file:
            self._parent = subprocess.Popen(
                [*_WCACHE, "supervise"], env=self._environment, stdin=subprocess.DEVNULL,
                stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + ENGINE_S
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            while probe.connect_ex(str(self.paths.supervisor_socket)):
                if time.monotonic() > deadline or self._parent.poll() is not None:
                    raise FailedCommand(f"wcache supervise does not listen:\n{self.log()}")
                time.sleep(0.01)

    def wcache(self, *arguments: str) -> Done:
        command = [*_WCACHE, *arguments]
        ran = subprocess.run(
            command, env=self._environment, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=COMMAND_S, check=False,
        )  # fmt: skip
        done = Done(f"wcache {' '.join(arguments)}", ran.stdout, ran.stderr, ran.returncode)
        if done.code != 0:
            raise FailedCommand(str(done))
        return done

    def engine(self) -> Engine:
        script = self._source / "scripts" / "survival_engine.py"
        return Engine([sys.executable, "-P", str(script)], self._environment)

    def stored(self) -> int:
        return self._commands.show([0])[0].stored_fds

    def events(self) -> list[Event]:
        return [
            Event(name="wcache restart", act=lambda: self.wcache("restart")),
            Event(name="kill -9 of the daemon", act=self._signal(signal.SIGKILL)),
            Event(name="SIGSTOP, watchdog abort", act=self._signal(signal.SIGSTOP)),
            Event(name="supervisor killed, wcache up", act=self._new_supervisor,
                  other_daemon=False),
            Event(name="kill -9 after takeover", act=self._signal(signal.SIGKILL)),
            Event(name="package anew, wcache restart", prepare=self._upgrade,
                  act=lambda: self.wcache("restart")),
        ]  # fmt: skip

    def stop(self) -> None:
        self.wcache("down", "0")

    def start(self) -> None:
        self.wcache("up")

    def keeps_over_stop(self) -> bool:
        return False

    def log(self) -> str:
        parts = []
        for file in sorted((self.folder / "state").rglob("*.log")):
            lines = file.read_text(errors="replace").splitlines()[-60:]
            parts.append("\n".join((f"{file.name}:", *lines)))
        return "\n".join(parts)

    def close(self) -> None:
        with contextlib.suppress(FailedCommand):
            self.wcache("down", "--force")
        if self._parent:
            # It has ended with its last rank, or long before; if not, this frees all that is left.
            self._parent.terminate()
            self._parent.wait(ENGINE_S)
        shutil.rmtree(self.folder)

    def _signal(self, number: signal.Signals) -> Callable[[], object]:
        return lambda: os.kill(_daemon_pid(self.paths), number)

    def _new_supervisor(self) -> None:
        assert self._parent
        self._parent.kill()
        self._parent.wait()
        self.wcache("up")

    def _upgrade(self) -> None:
        copy_checkout(self._source)
        _compile(self._source)


_WCACHE = (sys.executable, "-P", "-m", "wcache")


def _daemon_pid(paths: InstancePaths) -> int:
    found = ask(paths.rank(0))
    if found is None:
        raise FailedCommand("no daemon answers")
    return found.pid


def _python_path() -> list[str]:
    """What this interpreter was told to look through beside the checkout."""
    checkout = Path(__file__).parent.parent
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [entry for entry in entries if entry and Path(entry).resolve() != checkout.resolve()]


def _kept_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}


def _mounts() -> Iterator[Path]:
    """Mounts of this machine that an overlay on / does not show: of the driver, of Python."""
    needed = (Path(sys.base_prefix), Path(sys.executable).resolve())
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place = Path(line.split()[4].replace("\\040", " "))
        if place in _OWN or any(place.is_relative_to(top) for top in ("/dev", "/proc", "/sys")):
            continue
        of_driver = any(word in str(place).lower() for word in ("nvidia", "cuda"))
        if of_driver or any(path.is_relative_to(place) for path in needed):
            yield place


def _compile(source: Path) -> None:
    """As pip does it; daemons in their sandbox can not, and would compile at every start."""
    compileall.compile_dir(str(source / "wcache"), quiet=2)
