"""A real systemd for tests, with a copy of this checkout's wcache, and what is asked of them."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wcache.control import SilentDaemonError
from wcache.paths import InstancePaths, RankId
from wcache.protocol import Report
from wcache.ranks import ask

CHECKOUT = Path(__file__).parent.parent.parent
SCRIPT = CHECKOUT / "scripts" / "systemd-lab.sh"
TIMEOUT_S = 90.0

# Where things are inside. A virtual environment works at any path.
VENV, SOURCE, MODELS = "/opt/venv", "/opt/wcache", "/srv/models"
PYTHON = f"{VENV}/bin/python"
# What outlives a reboot.
KEPT = ("/etc/systemd/system", "/etc/wcache", "/usr/local/lib/systemd")


@dataclass(frozen=True)
class Done:
    """One command and how it ended."""

    command: str
    stdout: str
    stderr: str
    code: int

    def __str__(self) -> str:
        return f"$ {self.command}\n{self.stdout}{self.stderr}exit {self.code}"


class Lab:
    """A machine of the test's own; it ends with this process at the latest."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="wclab"))
        self.models = self.folder / "models"
        self.source = self.folder / "source"
        self._environment = {**os.environ, "WCACHE_LAB": str(self.folder / "lab")}
        self.models.mkdir()
        for place in KEPT:
            (self.folder / place.replace("/", "_")).mkdir()
        self.put_source()

    def put_source(self) -> None:
        """wcache as an upgrade leaves it: other files with the same content."""
        new = self.folder / "source.new"
        ignore = shutil.ignore_patterns("__pycache__")
        for name in ("wcache", "systemd", "tests"):
            shutil.copytree(CHECKOUT / name, new / name, ignore=ignore)
        self.source.mkdir(exist_ok=True)
        for name in ("wcache", "systemd", "tests"):
            shutil.rmtree(self.source / name, ignore_errors=True)
            (new / name).rename(self.source / name)
        new.rmdir()

    # --- power ----------------------------------------------------------------------------------

    def up(self) -> None:
        binds = [(sys.prefix, VENV), (self.source, SOURCE), (self.models, MODELS)]
        binds += [(self.folder / place.replace("/", "_"), place) for place in KEPT]
        # The interpreter that the environment was made with is seen, but not below these.
        base = Path(sys.base_prefix)
        if base.is_relative_to("/tmp") or base.is_relative_to("/run"):
            binds.append((base, str(base)))
        options = [word for source, target in binds for word in ("-b", f"{source}:{target}")]
        self._script("up", "-o", str(os.getpid()), *options)
        self.pid = int(self._script("pid").stdout)

    def down(self, *options: str) -> None:
        self._script("down", *options)

    def close(self) -> None:
        self.down()
        shutil.rmtree(self.folder)

    def install(self) -> None:
        """As an operator does it; the units find wcache where this checkout's copy lies."""
        self.write("/etc/wcache/environment", f"PYTHONPATH={SOURCE}\n")
        self.wcache("install")

    # --- commands -------------------------------------------------------------------------------

    def run(self, *command: str, check: bool = True) -> Done:
        """Runs ``command`` inside to its end."""
        return self._script("exec", "--", *command, check=check)

    def wcache(self, *arguments: str, check: bool = True) -> Done:
        return self.run("env", f"PYTHONPATH={SOURCE}", PYTHON, "-P", "-m", "wcache", *arguments,
                        check=check)  # fmt: skip

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        return self.run("systemctl", *arguments, check=check).stdout

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        text = self.systemctl("show", unit, "--property", ",".join(properties))
        return dict(line.split("=", 1) for line in text.splitlines())

    def journal(self, unit: str) -> str:
        return self.run("journalctl", "--no-pager", "-o", "cat", "-u", unit).stdout

    def status(self, instance: str = "") -> dict[str, Any]:
        option = ["--instance", instance] if instance else []
        found: dict[str, Any] = json.loads(
            self.wcache("status", "--json", *option, check=False).stdout
        )
        return found

    def kill(self, number: str, pid: int) -> None:
        self.run("kill", f"-{number}", str(pid))

    def _script(self, *arguments: str, check: bool = True) -> Done:
        ran = subprocess.run(
            [str(SCRIPT), *arguments], env=self._environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        done = Done(" ".join(arguments), ran.stdout, ran.stderr, ran.returncode)
        assert not check or done.code == 0, str(done)
        return done

    # --- a look inside --------------------------------------------------------------------------

    def path(self, inside: str) -> Path:
        """A file of the lab, as it is reached from here."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def write(self, inside: str, text: str) -> None:
        self.path(inside).write_text(text)

    def paths(self, instance: str = "") -> InstancePaths:
        return InstancePaths(
            instance,
            self.path("/run/wcache"),
            self.path("/etc/wcache"),
            self.path("/var/lib/wcache"),
        )

    def report(self, rank: int = 0, instance: str = "") -> Report | None:
        """None too for a daemon that is stopped and does not answer."""
        try:
            return ask(self.paths(instance).rank(rank))
        except SilentDaemonError:
            return None

    def stored(self, instance: str, rank: int = 0) -> int:
        shown = self.show(daemon(instance, rank), "NFileDescriptorStore")
        return int(shown["NFileDescriptorStore"])

    def slabs_held(self) -> int:
        """Descriptors of slabs that any process of the lab has open, systemd included."""
        script = "find /proc/[0-9]*/fd -lname '*memfd:wcache-slab*' 2>/dev/null | wc -l"
        return int(self.run("bash", "-c", script).stdout)

    def bytes_read(self, pid: int) -> int:
        """By all read(2) of a process inside, also from the page cache."""
        text = self.run("cat", f"/proc/{pid}/io").stdout
        return int(text.split("rchar: ")[1].split()[0])


class Engine:
    """An engine in the lab that has attached, and says what it computes of the weights."""

    def __init__(
        self, lab: Lab, instance: str, rank: int = 0, *, around: tuple[str, ...] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        environment = {"PYTHONPATH": SOURCE, "WCACHE_INSTANCE": instance, "WCACHE_RANK": str(rank)}
        environment |= variables or {}
        settings = [f"{name}={value}" for name, value in environment.items()]
        self._process = subprocess.Popen(
            [str(SCRIPT), "exec", "--", "env", *settings, *around, PYTHON, "-P", "-m",
             "tests.systemd.engine"],
            env=lab._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.pid: int = self._answer()["pid"]
        """In its own pid namespace."""

    def say(self) -> dict[str, Any]:
        """The digest of all its weights, as it reads them now, and how its lease is."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    @property
    def digest(self) -> str:
        return str(self.say()["digest"])

    @property
    def lease(self) -> str:
        return str(self.say()["lease"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the engine has ended"
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Its stdin ends, and so does it."""
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


@contextlib.contextmanager
def engine(lab: Lab, instance: str, rank: int = 0, **options: Any) -> Iterator[Engine]:
    made = Engine(lab, instance, rank, **options)
    try:
        yield made
    finally:
        made.close()


def daemon(instance: str, rank: int = 0) -> str:
    return f"wcache@{RankId(instance, rank)}.service"


def loader(instance: str, rank: int = 0) -> str:
    return f"wcache-load@{RankId(instance, rank)}.service"
