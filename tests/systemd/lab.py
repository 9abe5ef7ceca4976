"""A real systemd for tests, with a copy of this checkout's wcache, and what is asked of them."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wcache.paths import InstancePaths, RankId
from wcache.protocol.control import SilentDaemonError
from wcache.protocol.messages import Report
from wcache.ranks import ask

CHECKOUT = Path(__file__).parent.parent.parent
SCRIPT = CHECKOUT / "scripts" / "systemd-lab.sh"
TIMEOUT_S = 90.0

# Where things are inside. A virtual environment works at any path.
VENV, SOURCE, MODELS = "/opt/venv", "/opt/wcache", "/srv/models"
PYTHON = f"{VENV}/bin/python"
# What a copy of the checkout is made of.
COPIED = ("wcache", "systemd", "scripts", "tests")
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


class FailedCommand(AssertionError):
    """A command of the lab that had to succeed; its text is all that is known of it."""


class Lab:
    """A machine of the test's own; it ends with this process at the latest."""

    def __init__(
        self, *, binds: Sequence[tuple[Path, str]] = (), variables: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:  # fmt: skip
        """``binds`` are folders of this machine and where they are inside.

        ``variables`` are for everything that runs wcache there, and for the units; every command
        has ``timeout_s``.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="wclab"))
        self.models = self.folder / "models"
        self.source = self.folder / "source"
        self.variables = {"PYTHONPATH": SOURCE, **(variables or {})}
        self._binds = binds
        self._timeout_s = timeout_s
        self.environment = {**os.environ, "WCACHE_LAB": str(self.folder / "lab")}
        self.models.mkdir()
        for place in KEPT:
            (self.folder / place.replace("/", "_")).mkdir()
        self.put_source()

    def put_source(self) -> None:
        copy_checkout(self.source)

    # --- power ----------------------------------------------------------------------------------

    def up(self) -> None:
        binds = [(sys.prefix, VENV), (self.source, SOURCE), (self.models, MODELS)]
        binds += [(self.folder / place.replace("/", "_"), place) for place in KEPT]
        binds += self._binds
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
        while self.folder.exists():
            # One that ends with its owner removes its files at the same time.
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.folder)

    def install(self) -> None:
        """As an operator does it; the units find wcache where this checkout's copy lies."""
        lines = [f"{name}={value}\n" for name, value in self.variables.items()]
        self.write("/etc/wcache/environment", "".join(lines))
        self.wcache("install")

    # --- commands -------------------------------------------------------------------------------

    def run(self, *command: str, check: bool = True) -> Done:
        """Runs ``command`` inside to its end."""
        return self._script("exec", "--", *command, check=check)

    def wcache(self, *arguments: str, check: bool = True) -> Done:
        return self.run(*self.with_variables(), PYTHON, "-P", "-m", "wcache", *arguments,
                        check=check)  # fmt: skip

    def with_variables(self, **more: str) -> list[str]:
        """What is put in front of a command that runs wcache."""
        variables = {**self.variables, **more}
        return ["env", *(f"{name}={value}" for name, value in variables.items())]

    def exec(self, *command: str) -> list[str]:
        """The command of this machine that runs ``command`` inside; see :attr:`environment`."""
        return [str(SCRIPT), "exec", "--", *command]

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        return self.run("systemctl", *arguments, check=check).stdout

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        text = self.systemctl("show", unit, "--property", ",".join(properties))
        return dict(line.split("=", 1) for line in text.splitlines())

    @contextlib.contextmanager
    def drop_in(self, unit: str, text: str) -> Iterator[None]:
        """Settings of the operator's own for ``unit``, as by systemctl edit --runtime."""
        folder = f"/run/systemd/system/{unit}.d"
        self.path(folder).mkdir(parents=True)
        self.write(f"{folder}/override.conf", text)
        self.systemctl("daemon-reload")
        try:
            yield
        finally:
            self.path(f"{folder}/override.conf").unlink()
            self.path(folder).rmdir()
            self.systemctl("daemon-reload")

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
            [str(SCRIPT), *arguments], env=self.environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=self._timeout_s, check=False,
        )  # fmt: skip
        done = Done(" ".join(arguments), ran.stdout, ran.stderr, ran.returncode)
        if check and done.code != 0:
            raise FailedCommand(str(done))
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
        settings = lab.with_variables(
            WCACHE_INSTANCE=instance, WCACHE_RANK=str(rank), **(variables or {})
        )
        self._process = subprocess.Popen(
            lab.exec(*settings, *around, PYTHON, "-P", "-m", "tests.systemd.engine"),
            env=lab.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
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


def copy_checkout(folder: Path) -> None:
    """wcache as an upgrade leaves it: other files with the same content."""
    new = folder.with_name(f"{folder.name}.new")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        shutil.copytree(CHECKOUT / name, new / name, ignore=ignore)
    folder.mkdir(exist_ok=True)
    for name in COPIED:
        shutil.rmtree(folder / name, ignore_errors=True)
        (new / name).rename(folder / name)
    new.rmdir()


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
