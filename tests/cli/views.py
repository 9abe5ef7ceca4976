"""Ranks as daemons and supervisors would tell of them."""

from dataclasses import replace
from typing import Any

import msgspec

from wcache.config import Config, LayoutSection, ModelSection
from wcache.fingerprint import Fingerprint, compare, held_from, wanted_by
from wcache.protocol.messages import Report
from wcache.protocol.reports import GenerationReport, GenerationRole, LeaseReport, ProgressReport
from wcache.ranks import RankView
from wcache.state import RankState
from wcache.supervise.interface import UnitReport

GIB = 1 << 30


def config(content: str = "sha256:" + "a" * 64, *, tp: int = 2, **model: Any) -> Config:
    return Config(
        model=ModelSection(path="/models/a", content=content, **model),
        layout=LayoutSection(tp=tp),
    )


def report(
    rank: int = 0,
    *,
    held: Fingerprint | None = None,
    wanted: Config | None = None,
    leases: int = 0,
    **fields: Any,
) -> Report:
    """A daemon that holds ``held`` and has read the configuration ``wanted``."""
    generations: tuple[GenerationReport, ...] = ()
    if held is not None:
        generations = (
            GenerationReport(
                number=1, serving=True, how="loaded", manifest_digest="sha256:00",
                fingerprint=held, fingerprint_digest=held.digest(), weight_bytes=GIB,
                slab_bytes=GIB, slabs=1, storages=3, tensors=3, since=0.0,
            ),
        )  # fmt: skip
    asked = wanted_by(wanted, rank) if wanted else None
    said = {
        "state": RankState.READY if held else RankState.EMPTY,
        "status": "as it is",
        "expected_fds": 3 if held else 1,
        "differences": compare(held, asked) if held and asked else (),
    }
    return Report(
        instance="", rank=rank, pid=100 + rank, version="0", since=0.0, wanted=asked,
        generations=generations,
        leases=tuple(
            LeaseReport(pid=900 + index, uid=7, command="serve.py", generation=1, since=0.0)
            for index in range(leases)
        ),
        **(said | fields),
    )  # fmt: skip


def serving(rank: int = 0, *, of: Config, leases: int = 0, **fields: Any) -> RankView:
    """A rank that is up and holds the weights of ``of``."""
    held = report(rank, held=held_from(of, rank), wanted=of, leases=leases, **fields)
    return RankView(rank=rank, report=held, unit=unit(rank, stored_fds=held.expected_fds))


def staged(rank: int = 0, *, of: Config, and_staged: Config, leases: int = 0) -> RankView:
    """A rank that serves ``of`` and has loaded ``and_staged``."""
    one = serving(rank, of=of, leases=leases)
    return with_generation(one, and_staged, role="staged")


def with_generation(one: RankView, of: Config, *, role: GenerationRole, **fields: Any) -> RankView:
    """``one`` with another generation, of the next number."""
    assert one.report is not None
    first = one.report.generations[0]
    held = held_from(of, one.rank)
    said: dict[str, Any] = {"number": len(one.report.generations) + 1, "config": of}
    other = msgspec.structs.replace(
        first, serving=role == "serving", role=role, fingerprint=held,
        fingerprint_digest=held.digest(), **(said | fields),
    )  # fmt: skip
    changes: dict[str, Any] = {"generations": (*one.report.generations, other)}
    if role == "staged":
        changes["staging"] = wanted_by(of, one.rank)
    return replace(one, report=msgspec.structs.replace(one.report, **changes))


def unit(rank: int = 0, **fields: Any) -> UnitReport:
    up = UnitReport(rank=rank, state="active", main_pid=100 + rank)
    return msgspec.structs.replace(up, **fields)


def absent(rank: int = 0) -> RankView:
    return RankView(rank=rank, unit=UnitReport(rank=rank))


def progress(pid: int = 50, done: int = 1, total: int = 2) -> ProgressReport:
    return ProgressReport(
        generation=2, loader_pid=pid, phase="read", done_bytes=done, total_bytes=total, since=0.0
    )
