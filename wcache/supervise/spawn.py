"""Processes: how they are begun, signalled and reaped.

A process that is handed descriptors must find its own pid in LISTEN_PID (sd_listen_fds(3)), which
is known only after fork(2): so this forks by itself, which is safe because the supervisor has one
thread.
"""

import contextlib
import os
import resource
import select
import signal
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from wcache.errors import ExitCode

FIRST_FD = 3
# systemd's code for a command that could not be executed (systemd.exec(5)).
EXIT_EXEC = 203
MAX_LOG_BYTES = 8 << 20

_PRIVATE_VARIABLES = ("NOTIFY_SOCKET", "INVOCATION_ID", "JOURNAL_STREAM")
_PRIVATE_PREFIXES = ("LISTEN_", "WATCHDOG_")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended; neither is known of one that was not this process's child."""

    code: int | None = None
    signal: int | None = None

    @property
    def is_clean(self) -> bool:
        return self.code == 0

    @property
    def is_final(self) -> bool:
        """True when another try would end alike: RestartPreventExitStatus=78 in systemd's unit."""
        return self.code == ExitCode.CONFIGURATION

    def __str__(self) -> str:
        if self.code is not None:
            return f"exit {self.code}"
        if self.signal is None:
            return "unknown"
        try:
            return f"signal {signal.Signals(self.signal).name.removeprefix('SIG')}"
        except ValueError:  # a real-time signal
            return f"signal {self.signal}"


@dataclass(frozen=True, slots=True)
class Process:
    """A process that is held by a pidfd, so that it can not be taken for a later one."""

    pid: int
    pidfd: int
    is_child: bool

    def send(self, number: signal.Signals) -> None:
        """Signals it; one that has ended is passed over."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> Ending | None:
        """None while it runs. What a child leaves behind in its process group is killed."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if not poll.poll(0):
            return None
        if self.is_child:
            # Not reaped yet, so the number is still that of this group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        try:
            status = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return Ending()
        if status is None:
            return None
        if status.si_code == os.CLD_EXITED:
            return Ending(code=status.si_status)
        return Ending(signal=status.si_status)

    def close(self) -> None:
        os.close(self.pidfd)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A process to be."""

    command: Sequence[str]
    log: Path
    """Its stdout and stderr are added to this file."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment."""
    pid_variables: Sequence[str] = ()
    """Set to the new process's pid."""
    stored: Sequence[tuple[int, str]] = ()
    """(descriptor, name), by descriptor: they become 3, 4, … of the new process."""
    soft_limit: int | None = None
    """Of open files; None leaves this process's."""


def spawn(plan: Plan) -> Process:
    """Begins a process in a session of its own. Raises ``OSError``."""
    environment = clean_environment() | {"INVOCATION_ID": uuid.uuid4().hex} | dict(plan.variables)
    if plan.stored:
        environment["LISTEN_FDS"] = str(len(plan.stored))
        environment["LISTEN_FDNAMES"] = ":".join(name for _, name in plan.stored)
    try:
        log = open_log(plan.log)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        # An operator reads it, in the answer to his command and in status.
        raise OSError(f"{plan.log} can not be written: {why}") from None
    try:
        # A signal that came between fork and exec would run the supervisor's handler in the child
        # and be lost: it waits until the child has the default actions.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                _become(plan, environment, log)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    finally:
        os.close(log)
    try:
        return Process(pid, os.pidfd_open(pid), is_child=True)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def clean_environment() -> dict[str, str]:
    """This process's environment without what a supervisor says to one process only."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _PRIVATE_VARIABLES and not name.startswith(_PRIVATE_PREFIXES)
    }


def open_log(path: Path) -> int:
    """A descriptor that adds to ``path``; a file that has grown large is moved to ``path.1``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_name(f"{path.name}.1"))
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o640)


def _become(plan: Plan, environment: dict[str, str], log: int) -> NoReturn:
    """The child's half of :func:`spawn`: whatever happens, it never returns."""
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, 0)
        os.setsid()
        environment |= {name: str(os.getpid()) for name in plan.pid_variables}
        first_unused = _place([fd for fd, _ in plan.stored])
        last_open = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
        os.closerange(first_unused, last_open + 1)
        if plan.soft_limit is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (plan.soft_limit, hard))
        _reset_signals()
        os.execve(plan.command[0], list(plan.command), environment)
    except BaseException as error:  # noqa: BLE001  # the parent's frames must not run twice
        line = f"can not execute {plan.command[0]}: {error}\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode(errors="replace"))
    finally:
        os._exit(EXIT_EXEC)


def _place(fds: Sequence[int]) -> int:
    """Moves ``fds`` to 3, 4, … without close-on-exec; returns the first number after them.

    They are sorted, all different and none is below 3, so the i-th is at least 3 + i: a number that
    is written to was either free or has been moved already.
    """
    for target, fd in enumerate(fds, FIRST_FD):
        if fd == target:
            os.set_inheritable(fd, True)
        else:
            os.dup2(fd, target)
    return FIRST_FD + len(fds)


def _reset_signals() -> None:
    """Default actions (Python ignores SIGPIPE, the supervisor SIGHUP), then nothing blocked."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # those that the C library keeps for itself
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
