"""One run of an engine: started, watched until it serves, followed to its end, written down."""

import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from wcache.engines.interface import Engine, Launch, Probe, Sign
from wcache.engines.orders import EVENTS, Event
from wcache.errors import NotReadyError
from wcache.notify import Notifier
from wcache.run import outcome, timeline
from wcache.run.child import Child
from wcache.run.probe import Prober, Told, check_is_free
from wcache.run.timeline import Record, Timeline

# An engine without an API tells by an event that it is ready, and nothing wakes us for it.
_LOOK_S = 0.25
_END_S = 30.0
"""How long an engine that never got ready has to end after SIGTERM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is to be run, and how; nothing has been started."""

    engine: Engine | None
    command: tuple[str, ...]
    """As the operator gave it."""
    launch: Launch
    probe: Probe | Sign | None
    instance: str
    mode: str
    ready_timeout_s: float
    """How long an engine with an API may take to its first token, and a supervisor is asked to
    wait for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listeners:
    """Who is told what; all are called in the thread that calls :func:`run`."""

    ready: Callable[[Record], None]
    """Once, when the engine is ready."""
    ended: Callable[[Record], None]
    """Once, when it has ended."""


def run(plan: Plan, notifier: Notifier, listeners: Listeners) -> int:
    """Runs the engine to its end; returns its exit status as a shell has it.

    Raises :class:`wcache.errors.UsageError` for a command that can not be run,
    :class:`wcache.errors.WcacheError` when its port is taken, and :class:`NotReadyError`, after
    ending it, when it did not get ready in time.
    """
    if isinstance(plan.probe, Probe):
        check_is_free(plan.probe)
    extend_start(notifier, plan.ready_timeout_s)
    with tempfile.TemporaryDirectory(prefix="wcache-run-") as folder:
        events = Path(folder, "events")
        events.touch(mode=0o600)
        return _Session(plan, events, notifier, listeners).run()


def extend_start(notifier: Notifier, timeout_s: float) -> None:
    """Asks a supervisor to wait for so long: 90 s, its own time-out, are few for a large model."""
    notifier.say(f"EXTEND_TIMEOUT_USEC={int(timeout_s * 1e6)}")


class _Session:
    def __init__(self, plan: Plan, events: Path, notifier: Notifier, listeners: Listeners) -> None:
        self._plan = plan
        self._events = events
        self._notifier = notifier
        self._listeners = listeners
        self._timeline = Timeline()
        # From the thread that probes; a deque's ends are safe to use from two.
        self._told: deque[Told] = deque()
        self._events_seen: list[Event] = []
        self._prober: Prober | None = None
        self._ready_s: float | None = None
        self._tokenless = ""
        self._began = time.time()
        self._begun = time.monotonic()
        self._said = ""

    def run(self) -> int:
        plan = self._plan
        is_read = plan.engine is not None and plan.engine.marks
        with ExitStack() as ends:
            child = ends.enter_context(
                Child(
                    plan.launch.argv,
                    self._environment(),
                    line_seen=self._line if is_read else None,
                )
            )
            if isinstance(plan.probe, Probe):
                self._prober = Prober(plan.probe, child.pid, self._teller(child))
                ends.callback(self._prober.stop)
            elif plan.engine is None or (plan.probe is None and plan.mode == "off"):
                self._notifier.say("READY=1")  # nothing but its start will ever be told
            status = child.wait(self._too_late, self._pause)
            if status is None:
                child.terminate(_END_S)
                self._listeners.ended(self._record(None))
                raise self._not_ready()
        self._look()
        self._listeners.ended(self._record(status))
        return status

    def _not_ready(self) -> NotReadyError:
        stranger = ""
        if self._prober is not None and self._prober.stranger:
            stranger = "; another process listens on its port"
        return NotReadyError(
            f"the engine gave no token within {self._plan.ready_timeout_s:g} s, and was ended:"
            f" the last phase that it finished is {self._timeline.last or 'none'}{stranger}",
            hint="its own log above says more; --ready-timeout gives it longer",
        )

    def _environment(self) -> Mapping[str, str]:
        told = {**os.environ, **self._plan.launch.environment}
        if self._plan.mode != "off":
            told[EVENTS] = str(self._events)
        return told

    # --- what happens meanwhile -----------------------------------------------------------

    def _line(self, line: str) -> None:
        """A line of the engine's log."""
        if self._ready_s is not None or self._plan.engine is None:
            return
        for mark in self._plan.engine.marks:
            if mark.pattern.search(line):
                at_s = time.monotonic() - self._begun
                self._timeline.end(mark.phase, at_s, "log")
                if self._plan.probe == Sign(mark.phase):
                    self._tokenless = "its API can not be asked for one"
                    self._get_ready(at_s)

    def _teller(self, child: Child) -> Callable[[Told], None]:
        def tell(found: Told) -> None:
            self._told.append(found)
            child.wake()

        return tell

    def _too_late(self) -> bool:
        """Takes in what was told since; True when the engine should have been ready by now."""
        self._look()
        elapsed = time.monotonic() - self._begun
        # One that can not be asked may serve well, and say so in a log that is kept from us.
        if self._ready_s is not None or not isinstance(self._plan.probe, Probe):
            return False
        return elapsed > self._plan.ready_timeout_s

    def _pause(self) -> float | None:
        """None once there is nothing to wait for but the engine's end."""
        return None if self._ready_s is not None else _LOOK_S

    def _look(self) -> None:
        """Takes in what the probe and the engine's half of the adapter have told."""
        if self._ready_s is None:
            self._take_events()
        while self._told:
            found = self._told.popleft()
            at_s = found.at - self._begun
            if found.what != "refusal":
                self._timeline.end(found.what, at_s, "probe")
            if found.what != "port":
                self._tokenless = found.reason
                self._get_ready(at_s)
        if self._timeline.last != self._said and self._ready_s is None:
            self._said = self._timeline.last
            self._notifier.say(f"STATUS=starting: {self._said} done")

    def _take_events(self) -> None:
        for event in self._read_events():
            at_s = event.at - self._began
            if event.name in ("imports", "distributed"):
                self._timeline.end(event.name, at_s, "event")
            elif event.name in ("outcome", "read"):  # a miss is told before the disk is read
                self._timeline.end("weights", at_s, "event")
            elif event.name == "first_token" and self._plan.probe is None:
                self._timeline.end("first token", at_s, "event")
                self._get_ready(at_s)

    def _read_events(self) -> list[Event]:
        """All so far, also when somebody has tidied up the folder for temporary files."""
        found = timeline.read_events(self._events)
        if len(found) > len(self._events_seen):
            self._events_seen = found
        return self._events_seen

    def _get_ready(self, at_s: float) -> None:
        if self._ready_s is not None:
            return
        self._ready_s = at_s
        record = self._record(None)
        how = "no token was asked for" if self._tokenless else f"first token after {at_s:.1f} s"
        self._notifier.say("READY=1", f"STATUS=serving, {how}")
        self._listeners.ready(record)

    def _record(self, status: int | None) -> Record:
        events = self._read_events()
        found, reason = outcome.outcome_of(events)
        plan = self._plan
        return Record(
            began=self._began,
            engine=plan.engine.name if plan.engine is not None else "",
            command=plan.command,
            mode=plan.mode,
            instance=plan.instance,
            outcome="off" if plan.mode == "off" else found,
            reason=reason,
            phases=self._timeline.phases(),
            steps=timeline.steps(events),
            ready_s=self._ready_s,
            tokenless=self._tokenless,
            exit_code=status,
        )


def record_name(record: Record, pid: int) -> str:
    """Sorts by time; two runs that begin in one second differ in their pid."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(record.began)) + f"-{pid}"
