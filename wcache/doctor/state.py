"""Checks of the state folder: whether logs can be written, and what is kept there is used."""

import os
import shlex
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from wcache.doctor.evidence import Evidence
from wcache.doctor.finding import Finding, fail, ok, warn
from wcache.doctor.unseen import INSIDE
from wcache.kept import KeptFolder
from wcache.machine.permissions import who_may
from wcache.paths import InstancePaths

ELSEWHERE = "set WCACHE_STATE_DIR to a folder of yours"


def check_state(evidence: Evidence) -> Iterator[Finding]:
    """For whom the ranks are; others have neither logs nor anything kept of their own here."""
    instance = evidence.instance
    if not _are_ours(instance.run):
        return
    # Under systemd the journal has the logs.
    found = list(_log_problems(evidence)) if evidence.supervisor == "direct" else []
    found += _kept_problems(instance)
    yield from found or [ok("state", "logs and what was found out of models can be kept")]


def _are_ours(run: Path) -> bool:
    try:
        return run.stat().st_uid == os.geteuid()
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _log_problems(evidence: Evidence) -> Iterator[Finding]:
    """Neither supervisor nor daemon nor loader is started without its log."""
    instance = evidence.instance
    folder = instance.supervisor_log.parent
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        yield fail(
            "state", f"{there} is not a folder: logs can not be written, and nothing is started",
            f"mv {shlex.quote(str(there))} {shlex.quote(f'{there}.old')}",
        )  # fmt: skip
        return
    why = who_may(there, INSIDE | os.W_OK)
    ranks = {*evidence.views, *(evidence.config.ranks.local_ranks() if evidence.config else ())}
    for log in _logs(instance, sorted(ranks)):
        why = why or (who_may(log, os.W_OK) if os.path.lexists(log) else "")
    if why:
        detail = f"{why}: logs can not be written, and nothing is started"
        yield fail("state", detail, ELSEWHERE)


def _logs(instance: InstancePaths, ranks: Iterable[int]) -> Iterator[Path]:
    yield instance.supervisor_log
    for rank in ranks:
        yield from (instance.log_file(rank, part) for part in ("daemon", "loader"))


def _kept_problems(instance: InstancePaths) -> Iterator[Finding]:
    for folder in (instance.identity_folder, instance.architecture_folder):
        if why := KeptFolder(folder).fault():
            detail, mend = f"{folder} {why}", _put_away(folder)
        elif os.path.lexists(folder) and (why := who_may(folder, INSIDE | os.W_OK)):
            detail, mend = why, ELSEWHERE
        else:
            continue
        yield warn("state", f"{detail}: nothing there is used, and loads take longer", mend)


def _put_away(folder: Path) -> str:
    """What was kept is only found out again."""
    named, status = shlex.quote(str(folder)), folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return f"rm {named}"
    if os.geteuid() in (0, status.st_uid):
        return f"rm -r {named}"
    return f"mv {named} {shlex.quote(f'{folder}.old')}"
