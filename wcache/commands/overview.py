"""What ``status`` shows of an instance, as typed data and as tables."""

import time
from collections.abc import Iterable, Sequence

import msgspec

import wcache
from wcache.commands import gpu_memory
from wcache.commands.gpu_memory import GpuStatus
from wcache.config import Config, Loader
from wcache.difference import Difference, brief
from wcache.errors import ConfigError, ExitCode, NoPermissionError, WcacheError
from wcache.fingerprint import Fingerprint
from wcache.hints import PUBLISHED_AFTER_DOWN
from wcache.output import Table
from wcache.paths import InstancePaths
from wcache.protocol.reports import GenerationRole, How, ProgressReport
from wcache.ranks import RankView, read_config, told_together, view
from wcache.state import RankState
from wcache.supervise.interface import Supervisor
from wcache.units import duration, size


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A row of ``status``."""

    rank: int
    state: str
    """A state of :class:`wcache.state.RankState`; ``silent`` for a daemon that does not answer;
    without a daemon the supervisor's word, or ``down``."""
    ready: bool
    """An engine that attaches now gets weights."""
    wanted: bool
    """Part of the configuration."""
    generation: int | None = None
    how: How | None = None
    weight_bytes: int = 0
    held_bytes: int = 0
    """Of all slabs of all generations."""
    tensors: int = 0
    leases: int = 0
    since: float | None = None
    """Unix time of the daemon's start."""
    pid: int | None = None
    restarts: int = 0
    stored_fds: int | None = None
    """None where the supervisor could not be asked."""
    expected_fds: int = 0
    status: str = ""
    fingerprint: Fingerprint | None = None
    differences: tuple[Difference, ...] = ()
    progress: ProgressReport | None = None
    problems: tuple[str, ...] = ()


class GenerationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One generation that a rank holds."""

    rank: int
    number: int
    role: GenerationRole
    leases: int
    weight_bytes: int
    slab_bytes: int
    since: float
    model: str | None
    revision: str | None
    content: str | None


class LeaseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that has a rank's weights mapped."""

    rank: int
    pid: int
    uid: int
    command: str
    generation: int
    since: float


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of ``status --json``."""

    version: int = 1
    """Of this document. A field may be added without a new one."""
    wcache: str = wcache.__version__
    instance: str
    config_file: str
    supervisor: str | None
    """``direct`` or ``systemd``; None when none answers."""
    model: str | None
    revision: str | None
    loader: Loader | None = None
    ready: bool
    """Every rank of the configuration is ready with the weights that it wants."""
    ranks: tuple[RankStatus, ...]
    generations: tuple[GenerationStatus, ...] = ()
    """Of all ranks; what is served is among them."""
    leases: tuple[LeaseStatus, ...]
    gpus: tuple[GpuStatus, ...] = ()
    """That hold weights of the instance, or are to; none where weights are in host memory."""
    problems: tuple[str, ...]
    """Of the instance; each rank has its own."""

    @property
    def headline(self) -> str:
        """Which weights these are, for a person."""
        held = next((rank.fingerprint for rank in self.ranks if rank.fingerprint), None)
        words = [f"model {self.model}" if self.model else "no model is configured"]
        if held is not None and not self.model:
            words = [f"model {held.model or 'unknown'}, which no configuration names now"]
        if held is not None:
            words.append(f"tp {held.tp_size}, pp {held.pp_size}, dp {held.dp_size}")
            words.append(f"dtype {held.dtype}, on {held.device}")
        return ", ".join(words)

    @property
    def exit_code(self) -> ExitCode:
        wanted = [rank for rank in self.ranks if rank.wanted]
        if not wanted or not all(rank.ready for rank in wanted):
            return ExitCode.NOT_READY
        if any(rank.differences for rank in self.ranks):
            return ExitCode.MISMATCH
        if self.supervisor is None:
            return ExitCode.TRY_AGAIN
        if any((rank.stored_fds or 0) < rank.expected_fds for rank in wanted):
            return ExitCode.FAILED
        return ExitCode.CONFIGURATION if self.problems else ExitCode.DONE


def collect(
    instance: InstancePaths, ranks: Iterable[int], supervisor: Supervisor
) -> InstanceStatus:
    """Asks everybody; what can not be asked becomes a problem of the instance."""
    problems: list[str] = []
    config: Config | None = None
    try:
        config = read_config(instance)
        if config is None:
            problems.append(f"no configuration: {instance.config_file} is not there")
    except ConfigError as error:
        problems += error.problems or (error.message,)
    kind: str | None = supervisor.kind
    views: dict[int, RankView]
    try:
        views = view(instance, ranks, supervisor)
    except NoPermissionError:
        raise
    except WcacheError as error:
        kind = None
        hint = f": {error.hint}" if error.hint else ""
        problems.append(f"the supervisor can not be asked: {error.message}{hint}")
        views = view(instance, ranks, None)
    rows = tuple(rank_status(one, config) for one in views.values())
    whole = bool(rows) and all(row.ready and not row.differences for row in rows if row.wanted)
    return InstanceStatus(
        instance=instance.instance,
        config_file=str(instance.config_file),
        supervisor=kind,
        model=(config.model.hub_id or config.model.path) if config else None,
        revision=config.model.revision if config else None,
        loader=config.model.loader if config else None,
        ready=whole,
        ranks=rows,
        generations=tuple(generation_rows(views.values())),
        leases=tuple(
            LeaseStatus(rank=rank, **msgspec.structs.asdict(lease))
            for rank, one in views.items()
            for lease in one.leases
        ),
        gpus=gpu_memory.gpus_of(instance, views, config),
        problems=tuple(problems),
    )


def generation_rows(views: Iterable[RankView]) -> Iterable[GenerationStatus]:
    for one in views:
        for held in one.report.generations if one.report else ():
            yield GenerationStatus(
                rank=one.rank,
                number=held.number,
                role=held.role,
                leases=one.leases_on(held.number),
                weight_bytes=held.weight_bytes,
                slab_bytes=held.slab_bytes,
                since=held.since,
                model=held.fingerprint.model,
                revision=held.fingerprint.revision,
                content=held.fingerprint.content,
            )


def rank_status(one: RankView, config: Config | None) -> RankStatus:
    """Merges what daemon and supervisor say of a rank; ``config`` of None wants whatever runs."""
    report, unit, serving = one.report, one.unit, one.serving
    wanted = config is None or one.rank in config.ranks.local_ranks()
    differences = report.differences if report else ()
    return RankStatus(
        rank=one.rank,
        state=_state(one),
        ready=serving is not None,
        wanted=wanted,
        generation=serving.number if serving else None,
        how=serving.how if serving else None,
        weight_bytes=serving.weight_bytes if serving else 0,
        held_bytes=one.held_bytes,
        tensors=serving.tensors if serving else 0,
        leases=len(one.leases),
        since=report.since if report else None,
        pid=report.pid if report else (unit.main_pid or None) if unit else None,
        restarts=unit.restarts if unit else 0,
        stored_fds=unit.stored_fds if unit else None,
        expected_fds=report.expected_fds if report else 0,
        status=report.status if report else _last_words(one),
        fingerprint=serving.fingerprint if serving else None,
        differences=differences,
        progress=report.progress if report else None,
        problems=tuple(_problems(one, wanted)),
    )


def _state(one: RankView) -> str:
    if one.report is not None:
        return str(one.report.state)
    if one.silence:
        return "silent"
    if one.unit is None or one.unit.state == "inactive":
        return "down"
    return one.unit.state


def _last_words(one: RankView) -> str:
    """What is left to say of a rank without a daemon."""
    if one.silence:
        return one.silence
    if one.unit is None or one.unit.state == "inactive":
        return "not running"
    return one.unit.status or one.unit.result or one.unit.state


def _problems(one: RankView, wanted: bool) -> Iterable[str]:
    report, unit = one.report, one.unit
    if one.silence:
        yield one.silence
    if report is not None:
        yield from report.problems
        if report.state is RankState.FAILED:
            yield report.status
        if report.differences:
            fields = "; ".join(map(brief, report.differences))
            yield f"serves other weights than the configuration wants: {fields}"
    elif unit is not None and unit.state in ("failed", "restarting") and not unit.fault:
        how = f"the daemon ended with {unit.result}" if unit.result else "the daemon failed"
        yield f"{how}: {unit.status}" if unit.status else how
    if unit is not None and unit.fault:
        yield f"{unit.fault}: {unit.mend}"
    if unit is not None and unit.loader == "failed" and one.serving is None:
        yield (
            f"the loader failed: {unit.loader_result}"
            if unit.loader_result
            else ("the loader failed")
        )
    if one.missing_fds and one.lost_supervisor:
        yield (
            "no supervisor keeps its descriptors, the next crash would lose the weights:"
            " wcache up starts one that takes the rank over"
        )
    elif one.missing_fds and report is not None and unit is not None:
        yield (
            f"the supervisor keeps {unit.stored_fds} of {report.expected_fds} descriptors:"
            f" a crash would lose the weights: {one.mend_store}"
        )
    if not wanted and one.is_up:
        yield "is up and not part of the configuration"


def tables(status: InstanceStatus, now: float | None = None) -> Sequence[Table]:
    """The ranks; generations, where one is not served; leases and GPUs, where there are any."""
    now = time.time() if now is None else now
    ranks = Table("RANK", "STATE", ">GEN", "HOW", ">WEIGHTS", ">TENSORS", ">LEASES", ">UP",
                  ">PID", ">RESTARTS", ">FDS", "STATUS")  # fmt: skip
    for row in status.ranks:
        serving = row.generation is not None
        ranks.add(
            row.rank,
            row.state,
            row.generation,
            row.how,
            size(row.weight_bytes) if serving else None,
            row.tensors if serving else None,
            row.leases,
            duration(now - row.since) if row.since is not None else None,
            row.pid,
            row.restarts,
            _fds(row),
            row.status,
        )
    generations = Table("GENERATION OF RANK", ">GEN", "ROLE", ">LEASES", ">HELD", ">SINCE", "MODEL")
    if any(held.role != "serving" for held in status.generations):
        for held in status.generations:
            generations.add(
                held.rank,
                held.number,
                held.role,
                held.leases,
                size(held.slab_bytes),
                duration(now - held.since),
                " ".join(word for word in (held.model, held.revision) if word) or None,
            )
    leases = Table("LEASE OF RANK", ">GEN", ">PID", ">UID", ">SINCE", "COMMAND")
    for lease in status.leases:
        leases.add(
            lease.rank,
            lease.generation,
            lease.pid or None,
            lease.uid,
            duration(now - lease.since),
            lease.command,
        )
    return ranks, generations, leases, gpu_memory.table(status.gpus)


def _fds(row: RankStatus) -> str | None:
    """Stored and expected descriptors; nothing for a rank that has no daemon to expect any."""
    if not row.expected_fds and not row.stored_fds:
        return None
    expected = row.expected_fds or "?"  # a daemon that does not answer says no number
    return f"{'?' if row.stored_fds is None else row.stored_fds}/{expected}"


def problem_lines(status: InstanceStatus) -> list[str]:
    """Every problem on a line of its own, the instance's first."""
    own = (
        (row.rank, problem)
        for row in status.ranks
        for problem in row.problems
        # A daemon tells of a bad configuration as well; once is enough.
        if problem not in status.problems
    )
    return [*status.problems, *told_together(own)]


def next_step(status: InstanceStatus) -> str:
    """What to type when a rank is not as it should be; empty where all are, or one is loading."""
    waiting = [rank for rank in status.ranks if rank.wanted and not rank.ready]
    if any(rank.problems for rank in waiting):
        return "wcache doctor says what mends it, wcache logs what happened"
    if any(rank.differences and rank.progress is None for rank in status.ranks):
        if status.loader == "publish":
            return PUBLISHED_AFTER_DOWN
        return "wcache up loads what is wanted, under running engines wcache warm does"
    if any(rank.state == "down" for rank in waiting):
        return "wcache up starts what is down"
    return ""
