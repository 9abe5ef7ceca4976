"""``wcache run``: an engine on cached weights, watched until it really serves."""

import os
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wcache.commands.options import InstanceOption, JsonOption, QuietOption
from wcache.errors import ExitCode, UsageError, WcacheError
from wcache.output import Output
from wcache.paths import InstancePaths

if TYPE_CHECKING:
    from wcache.engines.interface import Wish
    from wcache.run.timeline import Record


class Mode(StrEnum):
    """How an engine comes to its weights."""

    CLIENT = "client"
    DAEMON = "daemon"
    OFF = "off"


class OnMismatch(StrEnum):
    FALLBACK = "fallback"
    FAIL = "fail"


def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="The engine, as always.")
    ] = None,
    mode: Annotated[
        Mode,
        typer.Option(
            "--mode",
            help="client: attach to what is up. daemon: wcache up first. off: change nothing.",
        ),
    ] = Mode.CLIENT,
    on_mismatch: Annotated[
        OnMismatch,
        typer.Option("--on-mismatch", help="When no cached weights fit: read the disk, or end."),
    ] = OnMismatch.FALLBACK,
    instance: InstanceOption = "",
    ready_timeout: Annotated[
        float,
        typer.Option(
            "--ready-timeout", min=1.0, metavar="SECONDS", help="How long to the first token."
        ),
    ] = 1800.0,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Show where the time of the last run went.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run an engine on cached weights, and say where the time of its start went.

    The engine's own options follow its command; those that wcache needs are added, and none of
    them is overridden. Signals go to the engine, and its exit status is this command's.
    """
    out = Output(as_json=as_json, quiet=quiet, instance=instance)
    paths = InstancePaths.of(instance)
    if timeline and not command:
        _show_last(paths, out)
        return
    if not command:
        raise UsageError(
            "no command to run", hint="wcache run -- vllm serve MODEL, or wcache run --timeline"
        )
    raise typer.Exit(
        _run(command, mode, on_mismatch, paths, ready_timeout, timeline=timeline, out=out)
    )


def _run(
    command: list[str],
    mode: Mode,
    on_mismatch: OnMismatch,
    paths: InstancePaths,
    ready_timeout_s: float,
    *,
    timeline: bool,
    out: Output,
) -> int:
    from wcache.engines.interface import Launch
    from wcache.engines.orders import Orders
    from wcache.engines.wrappers import find_engine, unadapted
    from wcache.notify import Notifier
    from wcache.protocol.messages import MAX_TEXT
    from wcache.run.session import Listeners, Plan, extend_start
    from wcache.run.session import run as run_engine
    from wcache.switches import without_secrets

    notifier = Notifier.from_environment()
    engine, begin = find_engine(command)
    # What a wrapper of the engine is told is none of ours.
    wrapper, bare = tuple(command[:begin]), command[begin:]
    strict = mode is Mode.DAEMON or on_mismatch is OnMismatch.FAIL
    if mode is not Mode.OFF and (name := unadapted(command)):
        _check_may_read_disk(name, out, strict=strict)
    shown = without_secrets(command)
    orders = Orders(
        instance=paths.instance,
        on_mismatch="fail" if strict else "fallback",
        command=" ".join(shown)[:MAX_TEXT],
    )
    if mode is Mode.OFF:
        launch = Launch(argv=tuple(command))
    elif engine is None:
        out.say(f"{command[0]} is no engine that wcache knows: it gets the environment alone")
        launch = Launch(argv=tuple(command), environment=orders.environment())
    else:
        launch = engine.launch(bare, orders)
        launch = replace(launch, argv=(*wrapper, *launch.argv))
    if mode is Mode.DAEMON:
        if engine is None:
            raise UsageError(
                f"--mode daemon needs an engine that wcache knows, and {command[0]} is none",
                hint="wcache up brings weights up for any program, --mode client runs it then",
            )
        from wcache.rollout.bring_up import bring_up

        extend_start(notifier, ready_timeout_s)
        bring_up(engine, engine.wish(bare), paths, out)
    if mode is not Mode.OFF and engine is not None and engine.runs_ranks_in_order:
        gpus = _gpus_shown(paths, engine.wish(bare), out, strict=strict)
        launch = replace(launch, environment={**launch.environment, **gpus})
    plan = Plan(
        engine=engine,
        command=tuple(shown),
        launch=launch,
        probe=engine.probe(bare) if engine is not None else None,
        instance=paths.instance,
        mode=mode.value,
        ready_timeout_s=ready_timeout_s,
    )
    scribe = Scribe(paths.runs_folder, out, shows_table=timeline or not out.quiet)
    return run_engine(plan, notifier, Listeners(ready=scribe.ready, ended=scribe.ended))


def _check_may_read_disk(name: str, out: Output, *, strict: bool) -> None:
    """Raises :class:`UsageError` where an engine that can only read the disk may not."""
    if strict:
        raise UsageError(
            f"wcache has no adapter for {name}, which would read its weights from the disk",
            hint="--mode client without --on-mismatch fail runs it so",
        )
    out.warn(f"wcache has no adapter for {name}: it reads its weights from the disk, as ever")


def _gpus_shown(paths: InstancePaths, wish: "Wish", out: Output, *, strict: bool) -> dict[str, str]:
    """Variables that have an engine's ranks run on the GPUs that hold their weights."""
    from wcache.ranks import read_config

    try:
        config = read_config(paths)
    except (WcacheError, OSError):
        return {}  # the engine finds out, and does as it was ordered then
    if config is None or not config.memory.devices or wish.ranks != config.ranks.world_size:
        return {}  # nothing there fits it: it is not to be kept from its own GPUs
    from wcache.machine.devices import gpus
    from wcache.run.gpus import shown

    try:
        added = shown(config.memory.devices[: config.ranks.ranks_per_node], gpus())
    except UsageError as error:
        if strict:
            raise
        out.warn(f"{error.message} ({error.hint})")
        return {}
    if added:
        told = " ".join(f"{name}={value}" for name, value in added.items())
        out.say(f"{told} is set: there the ranks' weights are")
    return added


class Scribe:
    """Writes a run down, and says what became of it."""

    def __init__(self, folder: Path, out: Output, *, shows_table: bool) -> None:
        self._folder = folder
        self._out = out
        self._shows_table = shows_table
        self._said = False

    def ready(self, record: "Record") -> None:
        """At the first token, or what takes its place."""
        if record.tokenless:
            self._out.warn(f"the engine counts as ready without a token: {record.tokenless}")
        self._say_outcome(record)
        self._show(record)
        self._save(record)

    def ended(self, record: "Record") -> None:
        """At the end of the engine, whether it got ready or not."""
        self._say_outcome(record)
        # One that was ended for taking too long has no status, and that is said then.
        if not self._said and record.engine and record.exit_code is not None:
            self._out.say(_silence(record))
        if killed := _signal(record):
            self._out.say(f"the engine was ended by {killed}")
        if record.ready_s is None:
            self._show(record)
        self._save(record)

    def _show(self, record: "Record") -> None:
        if not (self._shows_table and record.phases):
            return
        from wcache.run.timeline import table

        for line in table(record).lines():
            self._out.say(line)

    def _say_outcome(self, record: "Record") -> None:
        if self._said or record.outcome is None:
            return
        self._said = True
        text = f"{record.outcome}: {record.reason}" if record.reason else record.outcome
        if record.outcome in ("miss", "mismatch"):
            self._out.warn(text)
        else:
            self._out.say(text)
        from wcache.run.outcome import count

        try:
            count(self._folder / "outcomes", record.outcome)
        except OSError as error:
            self._out.warn(f"the outcome is not counted: {_reason(error)}")

    def _save(self, record: "Record") -> None:
        from wcache.run.session import record_name
        from wcache.run.timeline import save

        try:
            save(record, self._folder, record_name(record, os.getpid()))
        except OSError as error:
            self._out.warn(f"the timeline is not written to {self._folder}: {_reason(error)}")


def _silence(record: "Record") -> str:
    """What to say of a run of which no outcome was told."""
    if record.steps or any(phase.source == "event" for phase in record.phases):
        return "the cache was asked for weights, and none were taken: the engine's own log says why"
    if record.ready_s is None and record.engine != "transformers":
        why = "" if _signal(record) else ": its own log says why"
        return f"the engine ended before it asked for weights{why}"
    return "no model was made by from_cache(), and no engine told of its weights"


def _signal(record: "Record") -> str:
    """By which signal the engine ended, of which its own log may say nothing; empty for none."""
    import signal

    number = (record.exit_code or 0) - 128
    return signal.Signals(number).name if number in set(signal.Signals) else ""


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _show_last(paths: InstancePaths, out: Output) -> None:
    from wcache.output import Table
    from wcache.run.outcome import counts
    from wcache.run.timeline import load, records, table

    found = records(paths.runs_folder)
    record = load(found[-1]) if found else None
    if record is None:
        raise WcacheError(
            "no run has been recorded here",
            hint="wcache run -- COMMAND writes one",
            exit_code=ExitCode.FAILED,
        )
    out.data(record, table(record))
    if not out.as_json:
        told = Table("OUTCOME", ">RUNS")
        for name, number in sorted(counts(paths.runs_folder / "outcomes").items()):
            told.add(name, number)
        if record.outcome:
            out.say(f"{record.outcome}: {record.reason}" if record.reason else record.outcome)
        for line in told.lines() if told.rows else []:
            out.say(line)
