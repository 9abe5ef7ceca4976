"""Checks of the configuration, and of the checkpoint against what was loaded from it."""

import os
import shlex
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from wcache.checkpoint import Checkpoint, Identity
from wcache.checkpoint.folder import CONFIG
from wcache.doctor.evidence import Evidence
from wcache.doctor.finding import Finding, fail, ok, warn
from wcache.doctor.unseen import look_again, unseen
from wcache.errors import CheckpointError, ExitCode
from wcache.machine.permissions import may_exist, who_may
from wcache.output import counted
from wcache.ranks import rank_words
from wcache.units import duration

# Clocks of file servers differ from ours by so much without anything being wrong.
_SKEW_S = 60.0


def check_configuration(evidence: Evidence) -> Iterator[Finding]:
    file = evidence.instance.config_file
    if evidence.problems and who_may(file, os.R_OK):
        yield unseen(evidence, "configuration", file, os.R_OK)
        return
    for problem in evidence.problems:
        yield fail("configuration", problem, f"edit {file}")
    if evidence.config is not None:
        yield ok("configuration", str(file))
    elif not evidence.problems:
        yield warn("configuration", f"{file} is not there", "wcache up --model … writes it")


def check_checkpoint(evidence: Evidence) -> Iterator[Finding]:
    """The files as they are now against what the configuration names and what is served."""
    config, found = evidence.config, evidence.identity
    if config is None or found is None:
        return
    path = config.model.path
    if isinstance(found, CheckpointError):
        if evidence.silence and found.exit_code is ExitCode.NO_PERMISSION:
            # Whoever may not ask the ranks is not the user that loads.
            detail = f"{found.message}; whether a loader can is not known"
            yield warn("checkpoint", detail, look_again(evidence))
            return
        gone = not may_exist(Path(path))
        mend = "mount it again, or: wcache up --model …" if gone else found.hint or f"ls {path}"
        if evidence.waiting():
            yield fail("checkpoint", found.message, mend)
        else:
            detail = f"lost weights could not be loaded again: {found.message}"
            yield warn("checkpoint", detail, mend)
        return
    changed = list(_changed(evidence, found))
    yield from changed or [
        ok("checkpoint", f"{path}: {counted(len(found.shards), 'file')}, as when it was loaded")
    ]


def check_clock(evidence: Evidence) -> Iterator[Finding]:
    """Files and daemons from the future: one of the clocks is wrong."""
    found = []
    if isinstance(evidence.checkpoint, Checkpoint):
        folder = evidence.checkpoint.path
        for name in (CONFIG, *(file.name for file in evidence.checkpoint.files)):
            ahead = _modified(folder / name) - evidence.now
            if ahead > _SKEW_S:
                detail = f"{folder / name} was written in {duration(ahead)} from now"
                found.append(warn("clock", detail, "timedatectl set-ntp true"))
                break  # the others of the folder say the same
    for rank, one in evidence.views.items():
        ahead = one.report.since - evidence.now if one.report else 0.0
        if ahead > _SKEW_S:
            detail = f"the daemon of rank {rank} was started in {duration(ahead)} from now"
            found.append(warn("clock", detail, "timedatectl set-ntp true"))
    yield from found or [ok("clock", "nothing is from the future")]


def check_transformers(evidence: Evidence) -> Iterator[Finding]:
    """It knows how a model is spread, and builds models; one rank is loaded without it."""
    config = evidence.config
    try:
        yield ok("transformers", metadata.version("transformers"))
    except metadata.PackageNotFoundError:
        asked = config is not None and (
            config.layout.tp > 1 or config.layout.pp > 1 or config.model.quantization != "auto"
        )
        needed = asked and config is not None and config.model.loader == "safetensors"
        mend = "pip install 'wcache[transformers]'"
        if needed and evidence.waiting():
            yield fail(
                "transformers", "not installed: weights can not be sharded or quantized", mend
            )
        else:
            yield warn(
                "transformers",
                "not installed: no sharding by tp or pp, no --quantization, no from_cache()",
                mend,
            )


def _changed(evidence: Evidence, found: Identity) -> Iterator[Finding]:
    config = evidence.config
    if config is None:
        return
    path = config.model.path
    named = shlex.quote(config.model.hub_id or path)
    mend = f"wcache up --model {named} … loads it as it is now"
    if any(one.leases for one in evidence.views.values()):
        # up is refused then: it would take weights from engines.
        mend = f"wcache warm --model {named} loads it as it is now, beside what engines use"
    if config.model.content not in (None, found.digest):
        yield fail("checkpoint", f"{path} is not what the configuration was written for", mend)
    other = [
        rank
        for rank, one in evidence.views.items()
        if one.serving and one.serving.fingerprint.content not in (None, found.digest)
    ]
    if other:
        verb = "serves" if len(other) == 1 else "serve"
        yield fail("checkpoint", f"{path} changed since: {rank_words(other)} {verb} the old", mend)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
