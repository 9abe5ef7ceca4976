"""The direct supervisor as commands see it: a client of ``wcache supervise``."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeVar

from wcache.errors import NoPermissionError, NoSuchRankError, TryAgainError, WcacheError
from wcache.paths import InstancePaths
from wcache.protocol.control import Channel, SilentDaemonError, connect_socket, receive_reply
from wcache.protocol.messages import Message
from wcache.protocol.name import is_stopped, keeper
from wcache.protocol.wire import peer_credentials
from wcache.supervise.direct.messages import (
    Load,
    Ok,
    Reports,
    Request,
    Restart,
    Show,
    Shutdown,
    Start,
    Stop,
    decode_reply,
)
from wcache.supervise.direct.record import RECORD_NAME, load_ranks
from wcache.supervise.interface import UnitReport

R = TypeVar("R", bound=Message)

LAUNCH = (sys.executable, "-P", "-m", "wcache.supervise")
LAUNCH_TIMEOUT_S = 30.0
# A stop waits for SIGTERM, SIGKILL and the end of them; a restart for a takeover before that.
REPLY_TIMEOUT_S = 90.0
# A supervisor that is not stuck answers at once what takes no time.
ANSWER_TIMEOUT_S = 4.0
IN_FOREGROUND = "it runs in the foreground, and its end is that of its container or its unit"
_ATTEMPTS = 3
_PAUSE_S = 0.1
_MAX_TAIL_BYTES = 4096


class DirectSupervisor:
    """Commands for the ranks of ``instance``; the supervisor is launched when it is needed."""

    kind: Literal["direct", "systemd"] = "direct"

    def __init__(self, instance: str, launch: tuple[str, ...] = LAUNCH) -> None:
        self._instance = instance
        self._paths = InstancePaths.of(instance)
        self._launch_command = launch

    def show(self, ranks: Iterable[int]) -> dict[int, UnitReport]:
        try:
            known = {unit.rank: unit for unit in self._ask(Show(), Reports).units}
        except NoSuchRankError:
            known = {}
        return {rank: known.get(rank, UnitReport(rank=rank)) for rank in ranks}

    def start(self, ranks: Iterable[int]) -> None:
        self._ask_launched(Start(ranks=tuple(ranks)))

    def load(self, ranks: Iterable[int]) -> None:
        self._ask_launched(Load(ranks=tuple(ranks)))

    def restart(self, ranks: Iterable[int]) -> None:
        self._ask_launched(Restart(ranks=tuple(ranks)))

    def stop(self, ranks: Iterable[int]) -> None:
        wanted = tuple(ranks)
        try:
            self._ask(Stop(ranks=wanted), Ok)
        except NoSuchRankError:
            # The supervisor may have been killed, and daemons have outlived it.
            if any(self._is_served(rank) for rank in wanted):
                self._ask_launched(Stop(ranks=wanted))

    def shutdown(self) -> None:
        """Stops every rank and ends the supervisor, if there is one."""
        try:
            self._ask(Shutdown(), Ok)
        except NoSuchRankError:
            self.stop(load_ranks(self._paths.supervisor_folder / RECORD_NAME))

    def pid(self) -> int:
        """Of the supervisor, 0 where that can not be told; raises as every command does, and
        :class:`NoSuchRankError` where there is none."""
        channel, pid = self._connect()
        channel.close()
        return pid

    def replace(self) -> str:
        """Kills the supervisor and has a new one take its daemons over; why not, where it is not.

        Until that has stored their descriptors the daemons alone hold the weights. Raises
        :class:`WcacheError` when the new one does not start.
        """
        pid = self.pid()
        if not is_in_background(pid):
            return IN_FOREGROUND
        os.close(self._open_log())  # the new one could not begin without
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            return f"pid {pid}: {(error.strerror or str(error)).lower()}"
        try:
            # Asked with the pidfd in hand: it is of this supervisor, and of no later process.
            if self.pid() != pid:
                return "another supervisor has just begun"
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(ANSWER_TIMEOUT_S * 1000)
        finally:
            os.close(pidfd)
        self._launch()
        return ""

    def enable(self, ranks: Iterable[int]) -> None:
        """Nothing: who starts ``wcache supervise`` at boot has the configured ranks started."""

    def disable(self, ranks: Iterable[int]) -> None:
        """Nothing, as for :meth:`enable`."""

    def _is_served(self, rank: int) -> bool:
        from wcache.supervise.direct.takeover import find_daemon

        found = find_daemon(self._paths.rank(rank).socket)
        if found:
            found.close()
        return found is not None

    def _ask_launched(self, request: Request) -> None:
        for _ in range(_ATTEMPTS):
            try:
                self._ask(request, Ok)
                return
            except NoSuchRankError:
                # There is none, or it had just decided to end: every request can be made twice.
                self._launch()
        self._ask(request, Ok)

    def _ask(self, request: Request, kind: type[R]) -> R:
        """Raises :class:`NoSuchRankError` when there is no supervisor."""
        channel, pid = self._connect()
        waited_s = ANSWER_TIMEOUT_S
        try:
            if not isinstance(request, Show):
                # What takes its time is waited for only if there is somebody at work on it.
                channel.send(Show())
                receive_reply(channel, Reports, decode_reply)
                waited_s = REPLY_TIMEOUT_S
                channel.settimeout(waited_s)
            channel.send(request)
            return receive_reply(channel, kind, decode_reply)
        except ConnectionError as error:
            raise NoSuchRankError(f"the supervisor has ended: {error}") from None
        except TimeoutError:
            raise self._silent(pid, f"does not answer within {waited_s:g} s") from None
        finally:
            channel.close()

    def _connect(self) -> tuple[Channel, int]:
        """A connection, and the supervisor's pid; raises as :meth:`_ask`.

        A supervisor whose run folder was removed makes its socket again, which is waited for: a
        second one would be another supervisor of the same ranks.
        """
        path = self._paths.supervisor_socket
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            try:
                connection = connect_socket(path, "the supervisor", ANSWER_TIMEOUT_S)
                return Channel(connection), peer_credentials(connection).pid
            except SilentDaemonError:
                pid = keeper(self._paths) or 0
                raise self._silent(pid, f"does not answer within {ANSWER_TIMEOUT_S:g} s") from None
            except NoSuchRankError:
                keeping = keeper(self._paths)
                if keeping is None:
                    raise
                if time.monotonic() >= deadline:
                    raise self._silent(keeping, f"does not listen on {path}") from None
            except OSError as error:
                raise WcacheError(f"supervisor can not be reached: {path}: {error}") from None
            time.sleep(_PAUSE_S)

    def _silent(self, pid: int, how: str) -> TryAgainError:
        """What is said of a supervisor that runs and does not do its part."""
        if pid <= 1:
            # Not known, or process 1 of a container, which nothing in it can kill.
            return TryAgainError(f"the supervisor {how}", hint=f"see {self._paths.supervisor_log}")
        ends = (
            f"kill -9 {pid} ends it and leaves daemons and weights as they are: the next wcache up"
            " takes them over"
        )
        if is_stopped(pid):
            return TryAgainError(
                f"the supervisor (pid {pid}) is stopped and {how}",
                hint=f"kill -CONT {pid} has it go on; {ends}",
            )
        return TryAgainError(
            f"the supervisor (pid {pid}) {how}", hint=f"see {self._paths.supervisor_log}; {ends}"
        )

    def _launch(self) -> None:
        """Starts a supervisor in the background and waits until it takes commands.

        Raises :class:`WcacheError` with the reason when it does not get there.
        """
        from wcache.supervise.spawn import clean_environment

        log_file, log = self._paths.supervisor_log, self._open_log()
        start = os.fstat(log).st_size
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            subprocess.run(
                [*self._launch_command, "--empty", "--detach", "--ready-fd", str(writer),
                 *([self._instance] if self._instance else [])],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(writer,),
                env=clean_environment(), start_new_session=True, check=False,
                timeout=LAUNCH_TIMEOUT_S,
            )  # fmt: skip
            os.close(writer)
            writer = -1
            ready = _is_ready(reader)
        except subprocess.TimeoutExpired:
            ready = False
        finally:
            os.close(log)
            os.close(reader)
            if writer >= 0:
                os.close(writer)
        if not ready and not self._is_up():
            reason = _last_line(log_file, start) or "it said nothing"
            raise WcacheError(f"supervisor did not start: {reason}", hint=f"see {log_file}")

    def _open_log(self) -> int:
        from wcache.supervise.spawn import open_log

        log_file = self._paths.supervisor_log
        try:
            return open_log(log_file)
        except PermissionError:
            raise NoPermissionError(
                f"no permission to write {log_file}", hint="use sudo, or set WCACHE_STATE_DIR"
            ) from None
        except OSError as error:
            raise WcacheError(
                f"{log_file} can not be written: {(error.strerror or str(error)).lower()}",
                hint="make room there, or set WCACHE_STATE_DIR to another folder",
            ) from None

    def _is_up(self) -> bool:
        """True when another command has launched one at the same time."""
        try:
            self._ask(Show(), Reports)
        except NoSuchRankError:
            return False
        return True


def is_in_background(pid: int) -> bool:
    """True for a supervisor that a command has launched; False where that can not be told."""
    if pid <= 1:
        return False
    try:
        return b"--detach" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _is_ready(reader: int) -> bool:
    """Waits for the byte that says so; the end of the stream says that it will not come."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    return bool(poll.poll(LAUNCH_TIMEOUT_S * 1000)) and os.read(reader, 1) != b""


def _last_line(log_file: Path, start: int) -> str:
    """The last line that was logged after ``start`` and is not a hint."""
    with contextlib.suppress(OSError), log_file.open("rb") as file:
        file.seek(max(start, log_file.stat().st_size - _MAX_TAIL_BYTES))
        lines = file.read(_MAX_TAIL_BYTES).decode(errors="replace").splitlines()
        # Without the time, level and name that stand in front of each line of the log.
        said = [line.partition("]: ")[2] or line for line in lines]
        return next((line for line in reversed(said) if not line.startswith("hint:")), "")
    return ""
