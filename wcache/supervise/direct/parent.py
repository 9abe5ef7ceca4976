"""``wcache supervise``: the parent of an instance's daemons where systemd is not running."""

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from wcache.config import load_config
from wcache.errors import (
    ConfigError,
    ExitCode,
    NoPermissionError,
    NotReadyError,
    TryAgainError,
    WcacheError,
)
from wcache.hints import for_instance
from wcache.log import setup_logging
from wcache.machine import open_files
from wcache.machine.permissions import who_may
from wcache.paths import InstancePaths
from wcache.protocol.messages import MAX_TEXT, RefusalReason, Refused
from wcache.protocol.name import keeper
from wcache.supervise.direct.claim import Claim
from wcache.supervise.direct.ground import (
    Signals,
    reap_orphans,
    seal_descriptors,
)
from wcache.supervise.direct.loop import Loop
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
)
from wcache.supervise.direct.plans import RankPlans
from wcache.supervise.direct.record import RECORD_NAME, load_ranks, save_ranks
from wcache.supervise.direct.server import ControlServer, Peer
from wcache.supervise.direct.takeover import find_daemon, lost_socket
from wcache.supervise.direct.timing import Commands, Timing
from wcache.supervise.direct.unit import Unit

log = logging.getLogger(__name__)

# A turn of the loop that took so much longer than it was to wait was not the daemons' fault: the
# supervisor was stopped, or the machine gave it no time, and gave them none perhaps.
_LATE_S = 1.0
_REASONS: tuple[tuple[type[WcacheError], RefusalReason], ...] = (
    (TryAgainError, "busy"),
    (NotReadyError, "not_ready"),
    (NoPermissionError, "permission"),
)


@dataclass(slots=True)
class Waiting:
    """A request whose answer is still to come."""

    peer: Peer
    answer: Callable[[], Ok | Refused | None]


class Parent:
    """The ranks of one instance and whoever gives commands for them."""

    def __init__(
        self,
        paths: InstancePaths,
        claim: Claim,
        signals: Signals,
        *,
        timing: Timing,
        commands: Commands,
        soft_limit: int | None,
        ends_when_idle: bool,
    ) -> None:
        self._paths = paths
        self._claim = claim
        self._signals = signals
        self._timing = timing
        self._commands = commands
        self._soft_limit = soft_limit
        self._ends_when_idle = ends_when_idle
        self._loop = Loop()
        self._units: dict[int, Unit] = {}
        self._waiting: list[Waiting] = []
        self._recorded: set[int] = set()
        self._ending = False
        self._is_displaced = False
        """Another supervisor has the instance: what this one keeps is left to it."""
        self._lost = ""
        """Why files that were removed could not be made again."""
        self._look_at = time.monotonic() + timing.look_s
        self._idle_since = time.monotonic()
        self._loop.watch(signals.wakeup, signals.drain)
        if claim.name is not None:
            self._loop.watch(claim.name.fileno(), claim.name.hang_up)
        self._server = ControlServer(self._loop, paths.supervisor_socket, self._handle)

    # --- the loop -------------------------------------------------------------------------------

    def adopt(self) -> int:
        """Looks for the daemons of the supervisor before; returns how many ranks it had."""
        recorded = load_ranks(self._record_file)
        self._recorded = set(recorded)
        for rank in recorded:
            self._unit(rank).adopt()
        return len(recorded)

    def run(self) -> None:
        """Serves until a signal, a command or idleness ends it."""
        before = time.monotonic()
        while not self._is_done():
            timeout_s = self._timeout()
            self._loop.step(timeout_s)
            now = time.monotonic()
            late_s = now - before - timeout_s
            before = now
            if late_s > _LATE_S:
                log.warning("this supervisor did not run for %.1f s: every rank gets as long",
                            late_s)  # fmt: skip
                for unit in self._units.values():
                    unit.postpone(late_s)
            for unit in list(self._units.values()):
                if unit.deadline <= now:
                    unit.tick(now)
            if now >= self._look_at:
                self._look_at = now + self._timing.look_s
                self._look_for_files()
            if self._signals.stop:
                self._signals.stop = False
                self._stop_everything("signal")
            if os.getpid() == 1:
                reap_orphans({pid for unit in self._units.values() for pid in unit.pids})
            self._answer_waiting()
            self._keep_record()
        if not self._is_displaced:
            self._keep_record()

    def close(self) -> None:
        self._server.close()
        for unit in self._units.values():
            unit.close()
        self._loop.close()

    def start(self, ranks: Iterable[int]) -> None:
        """Raises :class:`WcacheError` or ``OSError`` for the first rank that can not be."""
        for rank in sorted(set(ranks)):
            self._unit(rank).start()

    def _timeout(self) -> float:
        now = time.monotonic()
        deadline = min((unit.deadline for unit in self._units.values()), default=math.inf)
        if self._is_idle():
            deadline = min(deadline, self._idle_since + self._timing.idle_s)
        return max(0.0, min(deadline, self._look_at) - now)

    def _look_for_files(self) -> None:
        """Makes again what somebody has removed of the run folder, a cleaner of /tmp perhaps.

        Without its files a supervisor hears neither commands nor daemons, and would take these for
        hung ones.
        """
        try:
            again = self._claim.renew()
            again |= self._server.restore()
            for unit in self._units.values():
                again |= unit.restore()
        except TryAgainError as error:
            log.error("%s: the daemons are left to it", error.message)
            self._is_displaced = True
            return
        except (WcacheError, OSError) as error:
            if str(error) != self._lost:
                log.error("files were removed and can not be made again: %s", error)
            self._lost = str(error)
            return
        if again:
            log.warning("files in %s were removed, they are made again", self._paths.run)
            self._recorded = set()
        self._lost = ""

    def _is_done(self) -> bool:
        if self._is_displaced:
            return True
        if self._ending:
            return not self._waiting and all(unit.is_gone for unit in self._units.values())
        if not self._is_idle():
            self._idle_since = time.monotonic()
            return False
        if time.monotonic() - self._idle_since < self._timing.idle_s:
            return False
        # Somebody may have come at the last moment.
        self._server.accept()
        if self._server.connections:
            return False
        log.info("no rank is up, the supervisor ends")
        return True

    def _is_idle(self) -> bool:
        """A rank that failed is something to show, so it keeps the supervisor."""
        return (
            self._ends_when_idle
            and not self._server.connections
            and all(unit.is_gone and unit.state != "failed" for unit in self._units.values())
        )

    def _keep_record(self) -> None:
        up = {rank for rank, unit in self._units.items() if unit.is_up}
        if up == self._recorded:
            return
        # Also when it fails: not again at every turn of the loop, the next change writes it.
        self._recorded = up
        try:
            save_ranks(self._record_file, up)
        except OSError as error:
            log.error("started ranks can not be recorded: %s", error)

    @property
    def _record_file(self) -> Path:
        return self._paths.supervisor_folder / RECORD_NAME

    def _unit(self, rank: int) -> Unit:
        """Raises ``OSError`` when the rank's notify socket can not be made."""
        if rank not in self._units:
            paths = self._paths.rank(rank)
            plans = RankPlans(
                rank=paths.id,
                paths=self._paths,
                commands=self._commands,
                watchdog_s=self._timing.watchdog_s,
                soft_limit=self._soft_limit,
            )
            notify = self._paths.supervisor_folder / f"notify.{rank}"
            self._units[rank] = Unit(paths, notify, self._loop, plans, self._timing)
        return self._units[rank]

    # --- commands -------------------------------------------------------------------------------

    def _handle(self, peer: Peer, request: Request) -> None:
        try:
            self._obey(peer, request)
        except WcacheError as error:
            peer.answer(refusal(error))
        except OSError as error:
            peer.answer(Refused(reason="invalid", message=str(error)[:MAX_TEXT]))

    def _obey(self, peer: Peer, request: Request) -> None:
        if self._ending and not isinstance(request, Show | Stop | Shutdown):
            raise TryAgainError("the supervisor is ending")
        match request:
            case Show():
                peer.answer(Reports(units=tuple(u.report() for u in self._units.values())))
            case Start(ranks=ranks):
                self.start(ranks)
                peer.answer(Ok())
            case Load(ranks=ranks):
                for rank in sorted(set(ranks)):
                    self._known(rank).load()
                peer.answer(Ok())
            case Restart(ranks=ranks):
                self._restart(peer, sorted(set(ranks)))
            case Stop(ranks=ranks):
                self._stop(peer, sorted(set(ranks)))
            case Shutdown():
                self._stop_everything("command")
                self._wait(peer, lambda: self._when_gone(list(self._units.values())))

    def _known(self, rank: int) -> Unit:
        if rank not in self._units:
            raise TryAgainError(f"rank {self._paths.rank(rank).id} is not up",
                                hint="wcache up starts it")  # fmt: skip
        return self._units[rank]

    def _restart(self, peer: Peer, ranks: list[int]) -> None:
        before = {}
        for rank in ranks:
            unit = self._unit(rank)
            before[unit] = unit.starts
            unit.restart()

        def answer() -> Ok | Refused | None:
            for unit, starts in before.items():
                if unit.starts == starts and not unit.waits_to_restart:
                    return refusal(_not_restarted(unit))
            return Ok() if all(unit.starts > before[unit] for unit in before) else None

        self._wait(peer, answer)

    def _stop(self, peer: Peer, ranks: list[int]) -> None:
        units = []
        for rank in ranks:
            unit = self._units.get(rank)
            if unit is None or unit.is_gone:
                # A daemon may be up without this supervisor's doing.
                found = find_daemon(self._paths.rank(rank).socket)
                if found is None and (pid := keeper(self._paths.rank(rank))) is not None:
                    raise TryAgainError(f"rank {self._paths.rank(rank).id}: {lost_socket(pid)}")
                if found:
                    unit = self._unit(rank)
                    unit.take_over(found)
            if unit:
                unit.stop()
                units.append(unit)
        self._wait(peer, lambda: self._when_gone(units))

    def _stop_everything(self, why: str) -> None:
        if not self._ending:
            self._ending = True
            log.info("%s: every rank is stopped, which frees their weights", why)
            for _, unit in sorted(self._units.items()):
                unit.stop()

    def _when_gone(self, units: list[Unit]) -> Ok | Refused | None:
        if not all(unit.is_gone for unit in units):
            return None
        return next((refusal(_left(unit)) for unit in units if unit.left_behind), Ok())

    def _wait(self, peer: Peer, answer: Callable[[], Ok | Refused | None]) -> None:
        self._waiting.append(Waiting(peer, answer))

    def _answer_waiting(self) -> None:
        still = []
        for waiting in self._waiting:
            if not waiting.peer.is_open:
                continue
            if answer := waiting.answer():
                waiting.peer.answer(answer)
            else:
                still.append(waiting)
        self._waiting = still


def _not_restarted(unit: Unit) -> WcacheError:
    if unit.unkept:
        return WcacheError(
            f"rank {unit.id} is not restarted, its descriptors are not stored: {unit.unkept}",
            hint="a restart would lose the weights; wcache down and wcache up load them anew",
        )
    return TryAgainError(f"rank {unit.id} was stopped meanwhile")


def _left(unit: Unit) -> WcacheError:
    return WcacheError(
        f"rank {unit.id} is down but for {unit.left_behind}",
        hint="its memory is free when what it waits for answers or is unmounted, the model's disk"
        " as a rule: dmesg says more",
    )


def refusal(error: WcacheError) -> Refused:
    """What ``error`` becomes on the control socket."""
    reasons = (reason for kind, reason in _REASONS if isinstance(error, kind))
    return Refused(
        reason=next(reasons, "invalid"), message=error.message[:MAX_TEXT], hint=error.hint
    )


def run(
    instance: str,
    *,
    start_configured: bool = True,
    ends_when_idle: bool = False,
    ready_fd: int | None = None,
    timing: Timing | None = None,
    commands: Commands | None = None,
) -> int:
    """Supervises ``instance`` until SIGTERM, SIGINT or a command; returns an exit code.

    With ``start_configured`` the ranks of the instance's configuration are started, if there is
    one. ``ready_fd`` is closed, after one byte, when commands are taken. Raises
    :class:`WcacheError` when it can not begin.
    """
    timing = timing or Timing()
    paths = InstancePaths.of(instance)
    setup_logging("supervise", instance or "default")
    seal_descriptors()
    try:
        claim = Claim(paths, timing.lock_wait_s)
        parent = Parent(
            paths,
            claim,
            Signals(),
            timing=timing,
            commands=commands or Commands(),
            soft_limit=open_files.raise_limit(),
            ends_when_idle=ends_when_idle,
        )
        is_configured = start_configured and paths.config_file.exists()
    except PermissionError as error:
        refused = Path(error.filename)
        raise NoPermissionError(
            f"no permission to supervise ranks: {refused}",
            hint=who_may(refused, os.W_OK | os.X_OK) or "set WCACHE_RUN_DIR to a folder of yours",
        ) from None
    except OSError as error:
        raise WcacheError(f"can not begin: {error}", hint="see WCACHE_RUN_DIR") from None
    try:
        adopted = parent.adopt()
        if is_configured:
            _start_configured(parent, paths, adopted)
        elif start_configured and not adopted:
            log.warning(
                "%s is not there: no rank is started until %s",
                paths.config_file,
                for_instance("wcache up --model …", paths.instance),
            )
        if ready_fd is not None:
            with contextlib.suppress(OSError):  # whoever waited has gone
                os.write(ready_fd, b"\n")
                os.close(ready_fd)
        parent.run()
    finally:
        parent.close()
        claim.close()
    return ExitCode.DONE


def _start_configured(parent: Parent, paths: InstancePaths, adopted: int) -> None:
    """A configuration that can not be read ends a supervisor only if it keeps nothing yet."""
    try:
        parent.start(load_config(paths.config_file).ranks.local_ranks())
    except ConfigError as error:
        if not adopted:
            raise
        for line in error.problems or (error.message,):
            log.error("%s", line)
    except (WcacheError, OSError) as error:
        # Ranks that are up already are not given up for one that is not.
        log.error("not every rank could be started: %s", error)
