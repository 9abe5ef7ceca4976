"""Checks of what runs and of what is left over from what ran."""

import os
from collections.abc import Iterator

import msgspec

import wcache
from wcache.daemon.ready import Ready
from wcache.difference import brief
from wcache.doctor.evidence import Evidence
from wcache.doctor.finding import Finding, fail, ok, warn
from wcache.doctor.unseen import INSIDE, look_again, unseen
from wcache.errors import NoPermissionError, NoSuchRankError, UsageError, WcacheError
from wcache.hints import PUBLISHED_AFTER_DOWN
from wcache.machine.permissions import who_may
from wcache.output import counted
from wcache.paths import InstancePaths, RankId, RankPaths
from wcache.protocol.control import SilentDaemonError, connect_socket
from wcache.ranks import RankView, rank_words
from wcache.rollout.renewal import outdated
from wcache.supervise.direct.client import IN_FOREGROUND, is_in_background
from wcache.supervise.systemd.manager import DAEMON
from wcache.units import size

_CONNECT_TIMEOUT_S = 2.0
_MAX_READY_BYTES = 1 << 16


def check_ranks(evidence: Evidence) -> Iterator[Finding]:
    """Daemons that are down, do not answer, end again and again, or are of another version."""
    if evidence.silence:
        mend = evidence.silence_mend or look_again(evidence)
        yield fail("ranks", f"can not be asked: {evidence.silence}", mend)
    found = [*_silent(evidence), *_rivals(evidence), *_down(evidence), *_drifted(evidence)]
    yield from found
    up = sum(one.report is not None for one in evidence.views.values())
    if not found and not evidence.silence:
        yield ok("ranks", f"{up} of {len(evidence.views)} run and answer")


def check_supervisor(evidence: Evidence) -> Iterator[Finding]:
    """A supervisor of wcache's own that an upgrade has left as it was."""
    version = outdated(evidence.views.values()) if evidence.supervisor == "direct" else None
    if version is None:
        return
    runs = f"runs wcache {version}" if version else "is of an earlier wcache"
    detail = f"wcache's own (pid {evidence.keeper}) {runs}, installed is {wcache.__version__}"
    if is_in_background(evidence.keeper):
        yield warn("supervisor", detail, "wcache restart")
    else:
        yield warn(
            "supervisor",
            f"{detail}; {IN_FOREGROUND}",
            "replace the container, or restart the unit: engines that go on give the weights back",
        )


def check_descriptors(evidence: Evidence) -> Iterator[Finding]:
    """Whether the supervisor keeps what the next daemon is to adopt."""
    found = []
    kept = 0
    for rank, one in evidence.views.items():
        name = _name(evidence, rank)
        kept += one.unit.stored_fds if one.unit else 0
        if _is_orphan(evidence, one):
            found.append(
                fail(
                    "supervisor",
                    f"the one of rank {name} has ended, its daemon (pid"
                    f" {one.report.pid if one.report else 0}) lives: a crash would lose the"
                    " weights",
                    "wcache up starts one that takes it over",
                )
            )
        elif one.missing_fds and one.report and one.unit:
            found.append(
                fail(
                    "descriptors",
                    f"{_keeper(evidence)} keeps {one.unit.stored_fds} of"
                    f" {one.report.expected_fds} of rank {name}: a crash would lose its weights",
                    one.mend_store,
                )
            )
        elif one.unit and one.unit.stored_fds and not one.is_up:
            found.append(
                warn(
                    "descriptors",
                    f"{_keeper(evidence)} keeps {counted(one.unit.stored_fds, 'descriptor')} of"
                    f" rank {name}, which does not run: memory is held for nobody",
                    f"wcache down {name} frees it, wcache up takes it up again",
                )
            )
    if not found and evidence.silence and not kept:
        return  # that ranks can not be asked is said above
    yield from found or [ok("descriptors", f"{kept} kept by {_keeper(evidence)}")]


def check_leftovers(evidence: Evidence) -> Iterator[Finding]:
    """Ranks that no configuration asks for, and files that nobody stands behind."""
    found = [*_unwanted(evidence), *_stale(evidence)]
    run = evidence.instance.run
    if who_may(run, INSIDE):
        found.append(unseen(evidence, "leftovers", run))
    yield from found or [ok("leftovers", "none")]


def _silent(evidence: Evidence) -> Iterator[Finding]:
    for rank, one in evidence.views.items():
        name = _name(evidence, rank)
        if one.silence:
            yield fail("ranks", f"rank {name}: {one.silence}", f"wcache restart {name}")
        elif one.report and one.report.problems:
            yield fail(
                "ranks", f"rank {name}: {'; '.join(one.report.problems)}", f"wcache logs {name}"
            )
        elif one.unit and one.unit.fault:
            yield fail("ranks", f"rank {name}: {one.unit.fault}", one.unit.mend)
        elif one.unit and one.unit.state == "failed":
            why = one.unit.status or one.unit.result or "the daemon failed"
            yield fail("ranks", f"rank {name} has failed: {why}", f"wcache logs {name}")
        elif one.unit and one.unit.state == "restarting" and one.report is None:
            ended = f" with {one.unit.result}" if one.unit.result else ""
            yield fail(
                "ranks",
                f"rank {name}: the daemon ended{ended} and is about to be started again",
                f"wcache logs {name}",
            )
        elif one.is_up and one.serving is None and one.unit and one.unit.loader == "failed":
            why = one.unit.loader_result or "it does not say why"
            yield fail("ranks", f"rank {name}: the loader failed: {why}", f"wcache logs {name}")
        elif one.report and one.report.version != wcache.__version__:
            yield warn(
                "ranks",
                f"rank {name} runs wcache {one.report.version}, installed is {wcache.__version__}",
                f"wcache restart {name}",
            )


def _down(evidence: Evidence) -> Iterator[Finding]:
    """Ranks that a command stopped, or that nothing has started; what is masked is told above."""
    local = evidence.config.ranks.local_ranks() if evidence.config else ()
    units = {rank: evidence.views[rank].unit for rank in local if rank in evidence.views}
    down = [
        rank
        for rank, unit in units.items()
        if unit and unit.state == "inactive" and not (unit.fault or unit.stored_fds)
        and not evidence.views[rank].is_up
    ]  # fmt: skip
    if down:
        detail = f"{rank_words(down)} of the configuration {'is' if len(down) == 1 else 'are'} down"
        yield warn("ranks", detail, "wcache up")


def _drifted(evidence: Evidence) -> Iterator[Finding]:
    """Ranks with other weights than the configuration wants: status and verify exit with 5."""
    by_field: dict[tuple[str, bool], list[int]] = {}
    for rank, one in evidence.views.items():
        fields = "; ".join(map(brief, one.report.differences if one.report else ()))
        if one.report and fields:
            by_field.setdefault((fields, one.report.progress is not None), []).append(rank)
    config = evidence.config
    mend = "wcache up, or under running engines wcache warm"
    if config is not None and config.model.loader == "publish":
        mend = PUBLISHED_AFTER_DOWN
    for (fields, is_loading), ranks in by_field.items():
        verb = "serves" if len(ranks) == 1 else "serve"
        yield fail(
            "ranks",
            f"{rank_words(ranks)} {verb} other weights than the configuration wants: {fields}",
            "others are being loaded: wcache status shows how far that is" if is_loading else mend,
        )


def _rivals(evidence: Evidence) -> Iterator[Finding]:
    """Units that are tried over and over beside a daemon that has their socket (exit 75)."""
    for rank in evidence.rivals:
        unit = f"{DAEMON}{_name(evidence, rank)}.service"
        yield fail(
            "ranks",
            f"{unit} can not start: a daemon of wcache's own supervisor serves that rank",
            # Not systemctl stop: it would remove the folder of the socket, which engines use.
            "wcache down ends it, and the unit then loads the weights",
        )


def _unwanted(evidence: Evidence) -> Iterator[Finding]:
    if evidence.config is None:
        # Weights are served without one; it is the reboot that would not bring them back.
        return
    local = evidence.config.ranks.local_ranks()
    for rank, one in evidence.views.items():
        if rank not in local and one.is_up:
            name = _name(evidence, rank)
            yield warn(
                "leftovers",
                f"rank {name} is not in the configuration and holds {size(one.held_bytes)}",
                f"wcache down {name}",
            )


def _stale(evidence: Evidence) -> Iterator[Finding]:
    for paths in _rank_folders(evidence.instance):
        one = evidence.views.get(paths.id.rank)
        if one is not None and one.is_up:
            yield from _wrong_ready(paths, one)
        elif one is None or one.report is None:
            yield from _files_of_nobody(evidence, paths)


def _rank_folders(instance: InstancePaths) -> list[RankPaths]:
    """Those of the instance that are in the run folder; none where it can not be listed."""
    found = []
    try:
        names = [entry.name for entry in instance.run.iterdir()]
    except OSError:
        return []
    for name in names:
        try:
            rank_id = RankId.parse(name)
        except UsageError:
            continue  # the supervisor's, or a lock
        if rank_id.instance == instance.instance:
            found.append(instance.rank(rank_id.rank))
    return sorted(found, key=lambda paths: paths.id)


def _files_of_nobody(evidence: Evidence, paths: RankPaths) -> Iterator[Finding]:
    """What is refused to us says nothing of who is there: a live daemon's files look the same."""
    try:
        ready, bound = paths.ready_file.exists(), paths.socket.exists()
    except PermissionError:
        yield unseen(evidence, "leftovers", paths.folder, os.X_OK)
        return
    if not ready and not bound:
        return
    try:
        if _answers(paths):
            return
    except NoPermissionError as error:
        if who_may(paths.socket, os.W_OK):
            yield unseen(evidence, "leftovers", paths.socket, os.W_OK)
        else:  # it is another user's
            yield warn("leftovers", error.message, error.hint or look_again(evidence))
        return
    if evidence.silence:
        yield warn(
            "leftovers",
            f"whose the files in {paths.folder} are is not known: the ranks can not be asked",
            look_again(evidence),
        )
        return
    # What a rank of the configuration has served is in its folder too: without that file an engine
    # that still has the weights could not give them back.
    is_wanted = evidence.config is not None and (
        paths.id.rank in evidence.config.ranks.local_ranks()
    )
    if ready:
        yield fail(
            "leftovers",
            f"{paths.ready_file} says ready, and no daemon runs",
            "wcache up" if is_wanted else f"rm {paths.ready_file}",
        )
    if bound and evidence.problems:
        mend = "wcache up, once the configuration can be read"
        yield warn("leftovers", f"nobody listens on {paths.socket}", mend)
    elif bound and not is_wanted:
        yield warn("leftovers", f"nobody listens on {paths.socket}", f"rm -r {paths.folder}")


def _answers(paths: RankPaths) -> bool:
    """False when nobody listens; raises :class:`NoPermissionError` when that can not be seen."""
    try:
        connection = connect_socket(paths.socket, "the rank", _CONNECT_TIMEOUT_S)
    except NoPermissionError:
        raise
    except NoSuchRankError as error:
        return isinstance(error, SilentDaemonError)
    except (OSError, WcacheError):
        return True  # it may be somebody
    connection.close()
    return True


def _wrong_ready(paths: RankPaths, one: RankView) -> Iterator[Finding]:
    """A ready file of a daemon before this one, or of one without weights."""
    if one.report is None:
        return  # it is being restarted, and removes or writes the file in a moment
    try:
        with paths.ready_file.open("rb") as file:
            ready = msgspec.json.decode(file.read(_MAX_READY_BYTES), type=Ready)
    except FileNotFoundError:
        return
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        yield fail("leftovers", f"{paths.ready_file} can not be read: {error}",
                   f"wcache restart {paths.id}")  # fmt: skip
        return
    if ready.pid != one.report.pid or one.serving is None:
        yield fail(
            "leftovers",
            f"{paths.ready_file} was written by pid {ready.pid}, the daemon is {one.report.pid}",
            f"wcache restart {paths.id}",
        )


def _is_orphan(evidence: Evidence, one: RankView) -> bool:
    """Under systemd it would be a daemon that somebody runs by hand."""
    return evidence.supervisor == "direct" and one.lost_supervisor


def _keeper(evidence: Evidence) -> str:
    return "systemd" if evidence.supervisor == "systemd" else "the supervisor"


def _name(evidence: Evidence, rank: int) -> str:
    return str(RankId(evidence.instance.instance, rank))
