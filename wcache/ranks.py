"""What is known of an instance's ranks, asked of their daemons and of their supervisor."""

import stat
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from wcache.config import Config, load_config
from wcache.difference import Difference
from wcache.errors import (
    ConfigError,
    NoPermissionError,
    NoSuchRankError,
    NotReadyError,
    TryAgainError,
    UsageError,
    WcacheError,
)
from wcache.fingerprint import compare, wanted_by
from wcache.machine.permissions import may_exist
from wcache.output import one_line
from wcache.paths import InstancePaths, RankId, RankPaths, check_instance_name
from wcache.protocol.control import Control, SilentDaemonError
from wcache.protocol.messages import AskReport, Report
from wcache.protocol.reports import GenerationReport, LeaseReport
from wcache.supervise.interface import Supervisor, UnitReport

# A daemon answers in well under a millisecond; one that does not in this time is stuck.
ANSWER_TIMEOUT_S = 3.0
_AT_ONCE = 16
_COMMAND_LENGTH = 80
_HOLDERS_TOLD = 8
_PAUSE_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class RankView:
    """One rank, as its daemon and its supervisor tell of it."""

    rank: int
    report: Report | None = None
    """None when no daemon answered."""
    silence: str = ""
    """Why a daemon that should answer did not; empty when it did, or when there is none."""
    unit: UnitReport | None = None
    """None when the supervisor could not be asked."""

    @property
    def serving(self) -> GenerationReport | None:
        return self.report.serving if self.report else None

    @property
    def leases(self) -> tuple[LeaseReport, ...]:
        return self.report.leases if self.report else ()

    @property
    def renewing(self) -> tuple[int, ...]:
        """Pids of engines that may have mapped what is held, and have no lease since a restart."""
        return self.report.renewing if self.report else ()

    @property
    def is_used(self) -> bool:
        return bool(holders([self]))

    @property
    def held_bytes(self) -> int:
        """Bytes of all slabs of all generations."""
        return sum(held.slab_bytes for held in self.report.generations) if self.report else 0

    @property
    def is_up(self) -> bool:
        """True when there is a daemon, or one is about to be."""
        running = ("starting", "active", "restarting", "stopping")
        at_work = self.unit is not None and self.unit.state in running
        return self.report is not None or bool(self.silence) or at_work

    @property
    def comes_back(self) -> bool:
        """True while a daemon that holds something is not there to be asked: it was killed, or its
        socket was removed, and its supervisor has it back in a moment."""
        stored = self.unit.stored_fds if self.unit is not None and self.is_up else 0
        # The configuration alone is stored of a rank without weights.
        return self.report is None and not self.silence and stored > 1

    @property
    def lost_supervisor(self) -> bool:
        """True when the daemon has outlived who kept it: nobody has it started again."""
        inactive = self.unit is not None and self.unit.state == "inactive"
        return self.report is not None and inactive

    def differences(self, config: Config) -> tuple[Difference, ...]:
        """In what the served weights are not those of ``config``; nothing when none are served."""
        serving = self.serving
        if serving is None:
            return ()
        return compare(serving.fingerprint, wanted_by(config, self.rank))

    def holding(self, config: Config) -> GenerationReport | None:
        """The generation with the weights of ``config``, whatever its part: the served one, or
        else the newest."""
        wanted = wanted_by(config, self.rank)
        held = self.report.generations if self.report else ()
        found = [one for one in held if not compare(one.fingerprint, wanted)]
        return max(found, key=lambda one: (one.serving, one.number), default=None)

    def leases_on(self, generation: int) -> int:
        return sum(lease.generation == generation for lease in self.leases)

    def serves(self, config: Config) -> bool:
        """True when an engine that attaches gets the weights of ``config``."""
        return self.serving is not None and not self.differences(config)

    @property
    def missing_fds(self) -> int:
        """Descriptors that the supervisor should keep and does not."""
        if self.report is None or self.unit is None:
            return 0
        return max(0, self.report.expected_fds - self.unit.stored_fds)

    @property
    def mend_store(self) -> str:
        """What has missing descriptors stored; empty when none are missing.

        systemd drops what is beyond FileDescriptorStoreMax= in silence (systemd.service(5)), and
        the whole store of a unit that is masked while it runs (measured with 252).
        """
        if not self.missing_fds or self.report is None or self.unit is None:
            return ""
        again = "wcache restart, which has them stored again first"
        needed, room = self.report.expected_fds, self.unit.max_fds
        if self.unit.fault:
            return f"{self.unit.mend}, then {again}"
        if room is not None and room < needed:
            return (
                f"set FileDescriptorStoreMax={needed} or more, it is {room}"
                f" (systemctl edit wcache@.service), then {again}"
            )
        return again


def ask(paths: RankPaths) -> Report | None:
    """The daemon's report, or None when there is no daemon.

    Raises :class:`WcacheError` when there is one that does not answer, or not to us.
    """
    try:
        with Control.connect(paths, "operator", timeout_s=ANSWER_TIMEOUT_S) as control:
            return control.request(AskReport(), Report)
    except SilentDaemonError:
        raise
    except NoSuchRankError:
        return None
    except NoPermissionError:
        if _is_being_made(paths):
            return None
        raise
    except TimeoutError:
        raise TryAgainError(
            f"the daemon of rank {paths.id} did not answer within {ANSWER_TIMEOUT_S:g} s"
        ) from None
    except ConnectionError:
        return None  # it ended while we asked
    except OSError as error:
        raise WcacheError(
            f"rank {paths.id} can not be asked: {paths.socket}: {(error.strerror or '').lower()}"
        ) from None


def ask_when_back(paths: RankPaths, within_s: float) -> Report | None:
    """:func:`ask`, for ``within_s`` again where a daemon was there before and none answers."""
    until = time.monotonic() + within_s
    while (found := ask(paths)) is None and time.monotonic() < until:
        if not (paths.socket.exists() or paths.served_file.exists()):
            break
        time.sleep(_PAUSE_S)
    return found


def _is_being_made(paths: RankPaths) -> bool:
    """True for a socket whose daemon has not set its mode yet: nobody may use it for a moment."""
    try:
        return stat.S_IMODE(paths.socket.stat().st_mode) == 0
    except OSError:
        return False


def view(
    instance: InstancePaths, ranks: Iterable[int], supervisor: Supervisor | None
) -> dict[int, RankView]:
    """Asks every daemon, side by side, and the supervisor; in the order of ``ranks``.

    ``supervisor`` of None leaves ``unit`` out, as where it is not to be asked too often. Raises
    :class:`NoPermissionError` when we may not ask.
    """
    wanted = list(ranks)
    units = supervisor.show(wanted) if supervisor and wanted else {}

    def one(rank: int) -> RankView:
        unit = units.get(rank)
        try:
            return RankView(rank=rank, report=ask(instance.rank(rank)), unit=unit)
        except NoPermissionError:
            raise
        except WcacheError as error:
            return RankView(rank=rank, silence=error.message, unit=unit)

    if len(wanted) < 2:
        return {rank: one(rank) for rank in wanted}
    with ThreadPoolExecutor(min(_AT_ONCE, len(wanted))) as pool:
        return dict(zip(wanted, pool.map(one, wanted), strict=True))


def found_on_disk(instance: InstancePaths) -> set[int]:
    """Ranks whose daemon runs or has run: they have a socket in the run folder."""
    found = set()
    for socket in instance.run.glob("*/control.sock"):
        try:
            rank_id = RankId.parse(socket.parent.name)
        except UsageError:
            continue  # the supervisor's own folder
        if rank_id.instance == instance.instance:
            found.add(rank_id.rank)
    return found


def read_config(instance: InstancePaths) -> Config | None:
    """The configuration, or None when there is none. Raises :class:`ConfigError` for a bad one."""
    return load_config(instance.config_file) if may_exist(instance.config_file) else None


def known_ranks(instance: InstancePaths) -> list[int]:
    """This node's ranks by the configuration, and those that run beside it.

    A configuration that can not be read hides nothing that runs.
    """
    try:
        config = read_config(instance)
    except ConfigError:
        config = None
    local = config.ranks.local_ranks() if config else ()
    return sorted({*local, *found_on_disk(instance)})


def not_up(ranks: Iterable[int]) -> NotReadyError:
    """Of ranks that the configuration has and that have no daemon."""
    down = list(ranks)
    is_, it = ("is", "it") if len(down) == 1 else ("are", "them")
    return NotReadyError(f"{rank_words(down)} {is_} not up", hint=f"wcache up starts {it}")


def select(instance_name: str, arguments: Sequence[str]) -> tuple[InstancePaths, list[int]]:
    """The instance and the ranks that an operator named; no ranks when he named none.

    Raises :class:`UsageError` for what is no rank, and when a rank names another instance.
    """
    if instance_name:
        check_instance_name(instance_name)
    ids = [RankId.parse(argument) for argument in arguments]
    names = {rank_id.instance for rank_id in ids if rank_id.instance or not instance_name}
    if instance_name:
        names.add(instance_name)
    if len(names) > 1:
        raise UsageError(
            "ranks of more than one instance: "
            + ", ".join(name or "the default one" for name in sorted(names)),
            hint="one call works on one instance",
        )
    paths = InstancePaths.of(next(iter(names), ""))
    return paths, sorted({rank_id.rank for rank_id in ids})


def chosen(instance: InstancePaths, ranks: Sequence[int]) -> list[int]:
    """``ranks``, or all that are known when it is empty.

    Raises :class:`NoSuchRankError` for a rank that is not known, and when there are none at all.
    """
    known = known_ranks(instance)
    if not known:
        # Says why: no file, or what is wrong with the file.
        try:
            load_config(instance.config_file)
        except ConfigError as error:
            if may_exist(instance.config_file):
                raise
            raise NoSuchRankError(
                f"no configuration, and nothing runs: {instance.config_file} is not there",
                hint="wcache up --model … writes it" + _named(instance),
            ) from error
    for rank in ranks:
        if rank not in known:
            raise NoSuchRankError(
                f"there is no rank {RankId(instance.instance, rank)} on this node",
                hint=f"this node has {rank_words(known)}",
            )
    return list(ranks) or known


def _named(instance: InstancePaths) -> str:
    return f"; this is the instance {instance.instance}" if instance.instance else ""


def span(ranks: Iterable[int]) -> str:
    """``0 to 7``, ``3``, or ``0, 2, 5``."""
    order = sorted(ranks)
    if len(order) > 2 and order[-1] - order[0] == len(order) - 1:
        return f"{order[0]} to {order[-1]}"
    return ", ".join(map(str, order))


def rank_words(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0 to 7``."""
    order = sorted(ranks)
    return f"{'rank' if len(order) == 1 else 'ranks'} {span(order)}"


def told_together(said: Iterable[tuple[int, str]]) -> list[str]:
    """``ranks 0 to 7: the disk is full``: a line for all ranks of which the same is said.

    In the order of ranks; what is said of one rank stays in its order.
    """
    ranks: dict[str, set[int]] = {}
    for rank, text in sorted(said, key=lambda one: one[0]):
        ranks.setdefault(text, set()).add(rank)
    return [f"{rank_words(alike)}: {text}" for text, alike in ranks.items()]


def holders(views: Iterable[RankView]) -> list[str]:
    """A line for each lease, or who may have one: whom to stop before weights can go."""
    found = []
    for one in views:
        found += [f"rank {one.rank}: {_who(lease)}" for lease in one.leases]
        if one.report is not None and one.report.generations:
            found += [f"rank {one.rank}: {_who_may(pid)}" for pid in one.renewing]
    return found


def first_of(used: Sequence[str]) -> str:
    """The lines of :func:`holders` as one, of which a person can still see the end."""
    more = len(used) - _HOLDERS_TOLD
    told = "; ".join(used[:_HOLDERS_TOLD])
    return f"{told}; and {more} more" if more > 0 else told


def _who_may(pid: int) -> str:
    return f"{_name(pid)} has not renewed its lease since the daemon's restart"


def _name(pid: int) -> str:
    # The kernel gives no pid for a peer in a pid namespace that the daemon can not see.
    return f"pid {pid}" if pid else "a process of another pid namespace"


def _who(lease: LeaseReport) -> str:
    command = one_line(lease.command, _COMMAND_LENGTH) or "no command"
    return f"{_name(lease.pid)} (uid {lease.uid}): {command}"
