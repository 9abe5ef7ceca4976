"""One rank under the direct supervisor: its daemon, loader and stored descriptors.

The states and the rules between them are those of a systemd unit with Type=notify,
Restart=always, WatchdogSec= and FileDescriptorStoreMax= (systemd.service(5)).
"""

import logging
import math
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import wcache
from wcache.errors import TryAgainError, WcacheError
from wcache.paths import RankPaths
from wcache.protocol.name import keeper
from wcache.supervise.direct.inbox import Inbox
from wcache.supervise.direct.loader_slot import LoaderSlot
from wcache.supervise.direct.loop import Loop
from wcache.supervise.direct.notify_message import NotifyMessage
from wcache.supervise.direct.plans import RankPlans
from wcache.supervise.direct.takeover import (
    FoundDaemon,
    Takeover,
    TakeoverResult,
    connect_again,
    find_daemon,
    lost_socket,
)
from wcache.supervise.direct.timing import Backoff, Timing
from wcache.supervise.interface import UnitReport, UnitState
from wcache.supervise.spawn import Ending, Process, spawn

log = logging.getLogger(__name__)


class Unit:
    """Everything that is known of one rank; :meth:`tick` is due at :attr:`deadline`."""

    def __init__(
        self, paths: RankPaths, notify_path: Path, loop: Loop, plans: RankPlans, timing: Timing
    ) -> None:
        self.id = paths.id
        self._paths = paths
        self._loop = loop
        self._plans = plans
        self._timing = timing
        self._inbox = Inbox(self.id, notify_path)
        self._loader = LoaderSlot(str(self.id), loop, timing, plans.loader)
        self._main: Process | None = None
        self._takeover: Takeover | None = None
        self._backoff = Backoff(timing)
        self._stop_asked = self._restart_asked = False
        self._fault = ""
        """Why the process is being ended without a command: ``watchdog``, ``start timeout``."""
        self._watchdog_s = timing.watchdog_s
        self._ready_since = math.inf
        self._start_by = self._ping_by = self._kill_at = self._restart_at = math.inf
        self.starts = 0
        """Processes that were begun or taken over."""
        self.unkept = ""
        """Why the descriptors of a daemon that was taken over are not in the store."""
        self.state: UnitState = "inactive"
        self._since = time.time()
        self._restarts = 0
        self._status = self._result = ""
        loop.watch(self._inbox.fileno(), self._hear)

    # --- what is asked of it --------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """True while a daemon runs or will run again by itself."""
        return self.state not in ("inactive", "failed")

    @property
    def is_gone(self) -> bool:
        """True when it is not up and its loader has ended too, or can not be ended."""
        return not self.is_up and (not self._loader.is_running or self._loader.is_stuck)

    @property
    def left_behind(self) -> str:
        """What is there still of a rank that is gone; empty when nothing is."""
        return f"its loader, {self._loader.result}" if self._loader.is_stuck else ""

    @property
    def pids(self) -> set[int]:
        """Processes that are reaped here; 0 stands for none."""
        return {self._main.pid if self._main else 0, self._loader.pid}

    @property
    def waits_to_restart(self) -> bool:
        """True while a new process is still to come."""
        return self.state == "restarting" or self._restart_asked

    @property
    def deadline(self) -> float:
        """When :meth:`tick` has something to do, on the monotonic clock."""
        takeover = self._takeover.deadline if self._takeover else math.inf
        own = min(self._start_by, self._ping_by, self._kill_at, self._restart_at)
        return min(own, self._loader.deadline, takeover)

    def report(self) -> UnitReport:
        return UnitReport(
            rank=self.id.rank,
            state=self.state,
            main_pid=self._main.pid if self._main else 0,
            restarts=self._restarts,
            stored_fds=len(self._inbox.store),
            status=self._status,
            result=self._result,
            since=self._since,
            loader=self._loader.state,
            loader_pid=self._loader.pid,
            loader_result=self._loader.result,
            supervisor_version=wcache.__version__,
        )

    def start(self) -> None:
        """Starts the rank unless it is up; raises :class:`WcacheError` or ``OSError``."""
        self._refuse_while_stopping()
        if not self.is_up:
            self._begin_by_command()
        elif self.state == "stopping":  # of the daemon's own will
            self._restart_asked = True

    def adopt(self) -> None:
        """Takes over the daemon that a supervisor before this one has left, if it still lives."""
        self._unattended(self._find)

    def load(self) -> None:
        """Runs the loader; raises :class:`TryAgainError` when there is no daemon for it."""
        self._refuse_while_stopping()
        if not self.is_up:
            raise TryAgainError(f"rank {self.id} is not up", hint="wcache up starts it")
        if self._main and not self._takeover and not self.waits_to_restart:
            self._loader.run()
        # In every other case the loader runs as soon as the daemon is there.

    def restart(self) -> None:
        """Restarts the daemon, or starts it; the stored descriptors are kept.

        Raises :class:`WcacheError` or ``OSError``.
        """
        self._refuse_while_stopping()
        if self._main is None:
            self._begin_by_command()
            return
        self._backoff.reset()
        self._restarts = 0
        if self.waits_to_restart:
            return
        if self.unkept and not self._takeover:
            # Another try to have the descriptors that are not in the store.
            self._converse(connect_again(self._paths.socket, self._main.pid), self._main.pid)
        self._restart_asked = True
        if not self._takeover and self.state != "stopping":
            self._terminate("restarting")

    def stop(self) -> None:
        """Begins to end the daemon and the loader; :attr:`is_gone` says when that is done."""
        self._cancel_takeover()
        self._loader.stop()
        self._restart_asked = False
        if self._main is None:
            self._result = ""
            self._settle("inactive")
        elif not self._stop_asked:
            self._terminate("stopping")
        self._stop_asked = True

    def restore(self) -> bool:
        """Makes the notify socket again if it was removed; True when it was. Raises ``OSError``."""
        if self._inbox.is_reachable:
            return False
        self._hear()
        self._loop.unwatch(self._inbox.fileno())
        try:
            self._inbox.restore()
        finally:
            self._loop.watch(self._inbox.fileno(), self._hear)
        return True

    def close(self) -> None:
        """Ends the rank's part of the supervisor; its processes are left alone."""
        self._cancel_takeover()
        self._loop.unwatch(self._inbox.fileno())
        self._inbox.close()

    def postpone(self, seconds: float) -> None:
        """Moves everything that is due: for so long the supervisor itself did not run."""
        self._start_by += seconds
        self._ping_by += seconds
        self._kill_at += seconds
        self._loader.postpone(seconds)
        if self._takeover:
            self._takeover.deadline += seconds

    def tick(self, now: float) -> None:
        if now >= self._kill_at and self._main:
            self._kill_at = math.inf
            self._fault = self._fault or "stop timeout"
            log.warning("rank %s: pid %d does not end, killed", self.id, self._main.pid)
            self._main.send(signal.SIGKILL)
        if now >= self._start_by:
            self._abort("start timeout")
        elif now >= self._ping_by:
            self._abort("watchdog")
        if now >= self._restart_at:
            self._restart_at = math.inf
            self._unattended(self._begin)
        self._loader.tick(now)
        if self._takeover:
            self._takeover.tick(now)

    # --- beginning a process --------------------------------------------------------------------

    def _refuse_while_stopping(self) -> None:
        if self._stop_asked and not self.is_gone:
            raise TryAgainError(f"rank {self.id} is being stopped")

    def _begin_by_command(self) -> None:
        try:
            self._begin()
        except (WcacheError, OSError) as error:
            # An automatic restart that is due stays due.
            if self.state != "restarting":
                self._result = str(error)
                self._settle("failed")
            raise
        self._result = ""
        self._backoff.reset()
        self._restarts = 0

    def _unattended(self, begin: Callable[[], None]) -> None:
        """Nobody waits who could be told of an error: it is shown, or tried again later."""
        try:
            begin()
        except (TryAgainError, OSError) as error:
            self._restart_later(f"can not be started: {error}")
        except WcacheError as error:
            log.error("rank %s: %s", self.id, error.message)
            if len(self._inbox.store):
                # Whatever is wrong may pass; weights that are dropped do not come back.
                self._restart_later(error.message)
            else:
                self._result = error.message
                self._settle("failed")

    def _begin(self) -> None:
        """Never a second daemon: whoever serves the rank's socket already is taken over."""
        if found := find_daemon(self._paths.socket):
            self.take_over(found)
            return
        if (pid := keeper(self._paths)) is not None:
            self._restart_later(lost_socket(pid))
            return
        stored = self._inbox.store.in_order()
        process = spawn(self._plans.daemon(self._inbox.path, stored))
        log.info("rank %s: daemon is pid %d, %d descriptors handed over",
                 self.id, process.pid, len(stored))  # fmt: skip
        self._supervise(process)
        self._loader.run_anew()

    def _supervise(self, process: Process) -> None:
        self._main = process
        self.starts += 1
        self._stop_asked = self._restart_asked = False
        self._fault = self.unkept = ""
        self._watchdog_s = self._timing.watchdog_s
        self._disarm()
        self._restart_at = math.inf
        self._start_by = time.monotonic() + self._timing.start_timeout_s
        self._enter("starting")
        self._loop.watch(process.pidfd, self._main_ended)

    # --- taking a daemon over -------------------------------------------------------------------

    def _find(self) -> None:
        if found := find_daemon(self._paths.socket):
            self.take_over(found)
        elif (pid := keeper(self._paths)) is not None:
            self._restart_later(lost_socket(pid))
        else:
            self._result = "ended while no supervisor ran"
            self._settle("failed")

    def take_over(self, found: FoundDaemon) -> None:
        """Supervises a daemon that is up already and has it store its descriptors again."""
        log.info("rank %s: daemon is up already, pid %d is taken over",
                 self.id, found.process.pid)  # fmt: skip
        self._supervise(found.process)
        self._converse(found.connection, found.process.pid)

    def _converse(self, connection: socket.socket, pid: int) -> None:
        deadline = time.monotonic() + self._timing.takeover_timeout_s
        self._takeover = Takeover(self._loop, self.id, pid, connection, deadline, self._taken_over)
        self._takeover.begin()

    def _cancel_takeover(self) -> None:
        if self._takeover:
            self._takeover.cancel()
            self._takeover = None

    def _taken_over(self, result: TakeoverResult) -> None:
        self._takeover = None
        self._hear()
        self.unkept = result.problem
        came = len(self._inbox.store)
        if not self.unkept and came < result.stored:
            self.unkept = f"{result.stored} were sent and {came} came"
        if self.unkept:
            log.error("rank %s: descriptors of the daemon are not stored: %s",
                      self.id, self.unkept)  # fmt: skip
            # It may never say READY=1 again, and what it serves must not end for that.
            if self.state == "starting":
                self._ready()
            self._ping_by = math.inf
        if self._restart_asked:
            self._restart_asked = not self.unkept
            if self._restart_asked:
                self._terminate("restarting")
        elif not result.loading:
            self._loader.run()

    # --- what the daemon says -------------------------------------------------------------------

    def _hear(self) -> None:
        for message in self._inbox.messages(self._main.pid if self._main else 0):
            if message.status is not None:
                self._status = message.status
            self._take_times(message)
            if message.ready and self.state == "starting":
                self._ready()
            if message.stopping and self.state in ("starting", "active"):
                self._disarm()
                self._kill_at = time.monotonic() + self._timing.stop_timeout_s
                self._enter("stopping")

    def _take_times(self, message: NotifyMessage) -> None:
        if message.extend_s is not None:
            until = time.monotonic() + message.extend_s
            if self._start_by < math.inf:
                self._start_by = max(self._start_by, until)
            elif self._kill_at < math.inf and not self._fault:
                self._kill_at = max(self._kill_at, until)
        if message.watchdog_s is not None:
            self._watchdog_s = message.watchdog_s
        if message.watchdog_s is not None or message.watchdog == "ping":
            self._arm_watchdog()
        if message.watchdog == "trigger" and self.state in ("starting", "active"):
            self._abort("watchdog")

    def _ready(self) -> None:
        self._start_by = math.inf
        self._ready_since = time.monotonic()
        self._enter("active")
        self._arm_watchdog()

    def _arm_watchdog(self) -> None:
        """As in systemd only a daemon that is ready is watched."""
        # A daemon that holds what nobody else does is never ended for its silence.
        watched = self._watchdog_s and self.state == "active" and not self.unkept
        self._ping_by = time.monotonic() + self._watchdog_s if watched else math.inf

    # --- ending a process -----------------------------------------------------------------------

    def _terminate(self, state: UnitState) -> None:
        assert self._main
        self._disarm()
        self._kill_at = time.monotonic() + self._timing.stop_timeout_s
        self._enter(state)
        self._main.send(signal.SIGTERM)

    def _abort(self, fault: str) -> None:
        """SIGABRT leaves a trace of where a daemon hangs; SIGKILL follows if it stays."""
        if self._main is None or self._fault or self.unkept:
            return
        log.error("rank %s: %s, pid %d is ended", self.id, fault, self._main.pid)
        self._disarm()
        self._fault = fault
        self._kill_at = time.monotonic() + self._timing.abort_timeout_s
        self._enter("restarting")
        self._main.send(signal.SIGABRT)

    def _disarm(self) -> None:
        self._start_by = self._ping_by = self._kill_at = math.inf

    def _main_ended(self) -> None:
        # What it said before it ended counts, and its pid is not another's before it is reaped.
        self._hear()
        assert self._main
        ending = self._main.reap()
        if ending is None:
            return
        self._loop.unwatch(self._main.pidfd)
        self._main.close()
        self._main = None
        self._cancel_takeover()
        self._disarm()
        if time.monotonic() - self._ready_since >= self._timing.settled_s:
            self._backoff.reset()
        self._ready_since = math.inf
        self._decide(ending, self._fault)

    def _decide(self, ending: Ending, fault: str) -> None:
        """What follows from the end of the daemon."""
        self._fault = ""
        by_command = self._stop_asked or self._restart_asked
        self._result = fault or ("" if ending.is_clean and by_command else str(ending))
        level = logging.INFO if by_command else logging.WARNING
        log.log(level, "rank %s: daemon ended: %s", self.id, fault or ending)
        if self._stop_asked:
            self._settle("inactive")
        elif self._restart_asked:
            self._enter("restarting")
            self._unattended(self._begin)
        elif ending.is_final and not fault:
            self._settle("failed")
        else:
            # Also after exit 0: somebody's plain kill of the daemon's pid is no order to free
            # its weights.
            self._restart_later(self._result)

    def _settle(self, state: UnitState) -> None:
        """The rank is down: what was kept for it is freed."""
        self._restart_at = math.inf
        if count := self._inbox.store.clear():
            log.info("rank %s: %d stored descriptors are dropped", self.id, count)
        self._loader.stop_soon()
        if self._status.startswith("serving"):
            self._status = ""  # it serves no more
        self._enter(state)

    def _restart_later(self, result: str) -> None:
        self._result = result
        self._restarts += 1
        self._restart_at = time.monotonic() + self._backoff.next_s()
        self._enter("restarting")

    def _enter(self, state: UnitState) -> None:
        if state != self.state:
            self.state, self._since = state, time.time()
