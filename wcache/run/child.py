"""The engine's process: its group, its signals, its terminal, its end."""

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

from wcache.errors import UsageError
from wcache.run.lines import CHUNK_BYTES, Passage

FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
STRAGGLERS_S = 10.0
"""How long processes that the engine left behind have to end after SIGTERM."""
# A pipe holds 1 MiB at most, unless its owner is privileged; a process that the engine left behind
# may go on filling it for ever.
_DRAINED_BYTES = 4 << 20
_PERIOD_S = 0.05
_LOOK_S = 0.25

# A child must not take our supervisor's words for its own.
_OURS = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID",
         "LISTEN_FDNAMES")  # fmt: skip


# As signal.signal() takes and gives them.
_Handler = Any


class Child:
    """One command in a process group of its own; use as a context, which ends the whole group."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        line_seen: Callable[[str], None] | None = None,
    ) -> None:
        """``line_seen`` gets every line that the child writes; None leaves its output alone.

        Raises :class:`UsageError` for a command that can not be run.
        """
        self._pidfd = -1
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._waking = threading.Lock()
        # From here to the end of the context: a signal in between would end this process alone.
        self._asked: list[int] = []
        self._hurried = False  # somebody asked for the end of what the child has left behind
        self._before: dict[int, _Handler] = {}
        # What is ignored here, by nohup say, has to be so still when the child inherits it.
        ignored = [n for n in FORWARDED if signal.getsignal(n) is signal.SIG_IGN]
        self._look_at_children()
        self._forward(number for number in FORWARDED if number not in ignored)
        try:
            self._process = _started(argv, environment, piped=line_seen is not None)
        except UsageError:
            self._forget_signals()
            raise
        self._forward(ignored)
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        for number in self._asked:
            self.signal(number)
        self._passages = self._opened(line_seen) if line_seen is not None else []
        self._terminal = _Terminal(self.pid)

    def _opened(self, seen: Callable[[str], None]) -> list[Passage]:
        streams = ((self._process.stdout, 1), (self._process.stderr, 2))
        # Descriptors of our own, so that Popen's file objects may be closed with it.
        return [Passage(os.dup(s.fileno()), fd, seen) for s, fd in streams if s is not None]

    # --- while it runs --------------------------------------------------------------------

    def wait(self, woken: Callable[[], bool], timeout_s: Callable[[], float | None]) -> int | None:
        """Until the child has ended; its exit status as a shell has it.

        ``woken`` is called whenever something happened, in this thread, and ends the wait by
        returning True: the result is None then. ``timeout_s`` says how long it may be until then.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._pidfd, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            for passage in self._passages:
                if passage.source >= 0:
                    selector.register(passage.source, selectors.EVENT_READ, passage)
            while True:
                ended = False
                for key, _ in selector.select(timeout_s()):
                    if key.fd == self._pidfd:
                        ended = True
                    elif key.fd == self._wake:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake, 4096)
                    elif not key.data.pass_on():
                        selector.unregister(key.fileobj)
                self._terminal.follow()
                if ended:
                    self._drain()
                    return self._status()
                if woken():
                    return None

    def wake(self) -> None:
        """Has :meth:`wait` look around; from any thread, also when the context is over."""
        with self._waking:
            self._write_wake()

    def _write_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if self._waker >= 0:
                os.write(self._waker, b"w")

    def signal(self, number: int) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            self._hurried = True

    def terminate(self, timeout_s: float) -> None:
        """SIGTERM, and time to follow it; what is left then ends with the context.

        What the child says about its end is passed on: one whose log nobody reads never ends.
        """
        deadline = time.monotonic() + timeout_s
        self.signal(signal.SIGTERM)
        self.wait(lambda: time.monotonic() > deadline, lambda: _LOOK_S)

    def _drain(self) -> None:
        """What the child wrote before it ended; its own children may hold the pipe for longer."""
        for passage in self._passages:
            if passage.source < 0:
                continue
            os.set_blocking(passage.source, False)
            with contextlib.suppress(BlockingIOError):
                for _ in range(_DRAINED_BYTES // CHUNK_BYTES):
                    if not passage.pass_on():
                        break

    def _status(self) -> int:
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def _forward(self, numbers: Iterable[int]) -> None:
        def forward(number: int, _: FrameType | None) -> None:
            if self._pidfd < 0:
                self._asked.append(number)
            else:
                self.signal(number)

        for number in numbers:
            self._before[number] = signal.signal(number, forward)

    def _look_at_children(self) -> None:
        def look(_number: int, _: FrameType | None) -> None:
            self._write_wake()  # the thread that runs this may hold the lock

        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, look)

    def _forget_signals(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        with self._waking:
            for fd in (self._wake, self._waker):
                os.close(fd)
            self._wake = self._waker = -1

    # --- its end --------------------------------------------------------------------------

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        """Ends whatever is left of the group, and gives the terminal back."""
        self._terminal.take_back()
        if not self._end_group(signal.SIGTERM, STRAGGLERS_S):
            self._hurried = False
            self._end_group(signal.SIGKILL, STRAGGLERS_S)
        for passage in self._passages:
            passage.close()
        self._forget_signals()
        os.close(self._pidfd)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _end_group(self, number: int, timeout_s: float) -> bool:
        """True when nobody of the group is left."""
        deadline = time.monotonic() + timeout_s
        try:
            os.killpg(self.pid, number)
            while time.monotonic() < deadline and not self._hurried:
                self._reap()
                os.killpg(self.pid, 0)
                time.sleep(_PERIOD_S)
        except ProcessLookupError:
            return True
        except PermissionError:
            return True  # what is left has changed its user, and is not ours to end
        return False

    def _reap(self) -> None:
        """Also what the engine left behind, where this process is what orphans fall to."""
        if self._process.poll() is None:
            return
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass


def _started(
    argv: Sequence[str], environment: Mapping[str, str], *, piped: bool
) -> "subprocess.Popen[bytes]":
    told = {name: value for name, value in environment.items() if name not in _OURS}
    pipe = subprocess.PIPE if piped else None
    try:
        return subprocess.Popen(list(argv), env=told, stdout=pipe, stderr=pipe, process_group=0)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(
            f"{argv[0]} can not be run: {said.lower()}", hint="is it installed here?"
        ) from None


class _Terminal:
    """Lends the terminal to the child's group, as a shell does, so that it gets Ctrl-C and may
    read; stops with it on Ctrl-Z. Does nothing when stdin is no terminal of ours."""

    def __init__(self, group: int) -> None:
        self._group = group
        try:
            self._is_ours = os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
        except OSError:
            self._is_ours = False
        self._give(group)

    def follow(self) -> None:
        """Stops this process when the child was stopped, and goes on with it."""
        if not self._is_ours:
            return
        try:
            state = os.waitid(os.P_PID, self._group, os.WSTOPPED | os.WNOHANG)
        except ChildProcessError:
            return  # it has ended, and so can not be stopped any more
        if state is None or state.si_code != os.CLD_STOPPED:
            return
        # It may have read before it was given the terminal; who is in the background stays there.
        asks = state.si_status in (signal.SIGTTIN, signal.SIGTTOU)
        if not (asks and self._give(self._group)):
            self._give(os.getpgrp())
            os.kill(os.getpid(), signal.SIGSTOP)
            self._give(self._group)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGCONT)

    def take_back(self) -> None:
        self._give(os.getpgrp())

    def _give(self, group: int) -> bool:
        """False when neither we nor the child have the terminal: it is not ours to give."""
        if not self._is_ours:
            return False
        # Whoever is not in the foreground is stopped for this call, unless the signal is ignored.
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            if os.tcgetpgrp(0) not in (os.getpgrp(), self._group):
                return False
            os.tcsetpgrp(0, group)
        except OSError:
            return False
        finally:
            signal.signal(signal.SIGTTOU, before)
        return True
