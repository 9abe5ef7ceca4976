"""Follows ranks until their weights are there, or are not going to be."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from wcache.config import Config
from wcache.errors import NotReadyError
from wcache.hints import PUBLISHED_AFTER_DOWN
from wcache.output import Output
from wcache.paths import InstancePaths
from wcache.ranks import RankView, rank_words, view
from wcache.state import RankState
from wcache.supervise.interface import Supervisor
from wcache.units import duration, size

PERIOD_S = 0.1
# The supervisor is asked less often than the daemons: under systemd that is a process each time.
SUPERVISOR_PERIOD_S = 0.5
# Right after a loader was asked for, what the supervisor tells may be of the one before it.
SETTLE_S = 3.0
MAX_RESTARTS = 5
_LOAD_FAILED = "load failed: "


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Where one rank is."""

    outcome: Literal["waits", "ready", "failed"]
    said: str
    """A phase while it waits, empty for no news; a sentence when it does not wait any more."""
    done_bytes: int = 0
    total_bytes: int = 0


def judge(one: RankView, config: Config, *, before: RankView, elapsed_s: float) -> Verdict:
    """Pure. ``before`` is the rank before ``up`` touched it, ``elapsed_s`` ago."""
    report = one.report
    if report is None:
        return _judge_absent(one, before, elapsed_s)
    if one.serves(config) and one.serving is not None:
        words = f"ready, {size(one.serving.weight_bytes)} {one.serving.how}"
        return Verdict(outcome="ready", said=f"{words} in {duration(elapsed_s)}")
    staged = one.holding(config)
    if staged is not None and staged.role == "staged":
        words = f"loaded {size(staged.weight_bytes)} in {duration(elapsed_s)}, not served yet"
        return Verdict(outcome="ready", said=words)
    if report.state is RankState.FAILED:
        return Verdict(outcome="failed", said=_reason(report.status))
    if report.progress is not None:
        progress = report.progress
        return Verdict(
            outcome="waits",
            said=progress.phase,
            done_bytes=progress.done_bytes,
            total_bytes=progress.total_bytes,
        )
    if report.reclaiming:
        return Verdict(outcome="waits", said="waiting for engines to give the weights back")
    if config.model.loader == "publish":
        words = "waits for the first engine to publish"
        if one.serving is not None:
            words = f"serves other weights: {PUBLISHED_AFTER_DOWN}"
        return Verdict(outcome="ready", said=f"up, {words}")
    why = [problem for problem in report.problems if "load failed" in problem]
    if _loader_failed(one, before, elapsed_s):
        loader = f"the loader failed: {one.unit.loader_result}" if one.unit else ""
        return Verdict(outcome="failed", said=why[0] if why else loader)
    if one.serving is not None and report.staging is None and elapsed_s > SETTLE_S:
        # It was ordered to have other weights loaded before any of this was asked.
        words = "the daemon does not want other weights any more"
        return Verdict(outcome="failed", said=why[0] if why else words)
    return Verdict(outcome="waits", said="waiting for the loader")


def _judge_absent(one: RankView, before: RankView, elapsed_s: float) -> Verdict:
    """No daemon answers: it is not up yet, or will not be."""
    unit = one.unit
    if unit is None:
        return Verdict(outcome="waits", said="")
    words = unit.status or unit.result
    if unit.status.startswith(_LOAD_FAILED) and unit.state != "starting":
        return Verdict(outcome="failed", said=_reason(unit.status))
    if unit.state == "failed":
        ended = f"the daemon ended with {unit.result}" if unit.result else "the daemon failed"
        return Verdict(outcome="failed", said=f"{ended}: {unit.status}" if unit.status else ended)
    if unit.state == "inactive" and elapsed_s > SETTLE_S:
        return Verdict(outcome="failed", said=f"the daemon is not up: {words or 'it was stopped'}")
    restarts = unit.restarts - (before.unit.restarts if before.unit else 0)
    if restarts >= MAX_RESTARTS:
        return Verdict(
            outcome="failed",
            said=f"the daemon was restarted {restarts} times: {words or 'no reason is known'}",
        )
    return Verdict(outcome="waits", said=one.silence or unit.state)


def _loader_failed(one: RankView, before: RankView, elapsed_s: float) -> bool:
    """True when the supervisor tells of a loader that failed, and not of one from before."""
    if one.unit is None or one.unit.loader != "failed":
        return False
    known = before.unit is not None and before.unit.loader == "failed"
    return not known or elapsed_s > SETTLE_S


def _reason(status: str) -> str:
    return status.removeprefix(_LOAD_FAILED)


def follow(
    paths: InstancePaths,
    config: Config,
    supervisor: Supervisor,
    before: Mapping[int, RankView],
    pending: Iterable[int],
    *,
    timeout_s: float | None,
    out: Output,
) -> dict[int, str]:
    """Shows progress until every rank of ``pending`` is ready or failed; returns the failures.

    One rank's failure does not end the others. Raises :class:`NotReadyError` after ``timeout_s``.
    """
    waiting = {rank: f"rank {rank}" for rank in pending}
    failures: dict[int, str] = {}
    begun = time.monotonic()
    asked = 0.0
    known: dict[int, RankView] = {}
    with out.bars(list(waiting.values())) as bars:
        while waiting:
            now = time.monotonic()
            ask_supervisor = now - asked >= SUPERVISOR_PERIOD_S
            seen = view(paths, waiting, supervisor if ask_supervisor else None)
            if ask_supervisor:
                asked, known = now, seen
            for rank, one in seen.items():
                # A daemon that just went away is judged once its supervisor has been asked too.
                unit = known[rank].unit if one.report is not None or ask_supervisor else None
                merged = RankView(rank=rank, report=one.report, silence=one.silence, unit=unit)
                verdict = judge(merged, config, before=before[rank], elapsed_s=now - begun)
                label = waiting[rank]
                if verdict.outcome == "waits" and not verdict.said:
                    continue
                if verdict.outcome == "waits":
                    bars.step(label, verdict.said, verdict.done_bytes, verdict.total_bytes)
                    continue
                del waiting[rank]
                if verdict.outcome == "failed":
                    failures[rank] = verdict.said
                bars.end(label, "failed" if verdict.outcome == "failed" else verdict.said)
            if waiting and timeout_s is not None and now - begun > timeout_s:
                raise NotReadyError(
                    f"{rank_words(waiting)} not ready after {timeout_s:g} s",
                    hint="loading goes on: wcache status shows how far it is, wcache down ends it",
                )
            time.sleep(PERIOD_S if waiting else 0)
    return failures
