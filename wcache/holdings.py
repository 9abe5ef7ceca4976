"""Who holds how much of which device, over all instances whose daemons can be asked."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from wcache.errors import UsageError, WcacheError
from wcache.paths import InstancePaths, RankId, RankPaths
from wcache.protocol.messages import Report
from wcache.ranks import ask
from wcache.units import size

_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What one rank holds of one device, in all its generations."""

    id: RankId
    device: str
    """UUID of a GPU, or ``cpu``."""
    nbytes: int


def held_by(rank_id: RankId, report: Report) -> list[Holding]:
    """Pure. One for each device that the rank's generations lie on."""
    by_device: dict[str, int] = {}
    for generation in report.generations:
        device = generation.fingerprint.device_uuid or generation.fingerprint.device or "cpu"
        by_device[device] = by_device.get(device, 0) + generation.slab_bytes
    return [Holding(id=rank_id, device=name, nbytes=held) for name, held in by_device.items()]


def held_words(holdings: Iterable[Holding]) -> str:
    """``instance draft holds 4.0 GiB, the default instance holds 1.0 GiB``: most first. Pure."""
    by_instance: dict[str, list[Holding]] = {}
    for holding in holdings:
        by_instance.setdefault(holding.id.instance, []).append(holding)
    total = {name: sum(one.nbytes for one in parts) for name, parts in by_instance.items()}
    return ", ".join(
        f"{f'instance {name}' if name else 'the default instance'} holds {size(total[name])}"
        for name in sorted(total, key=lambda name: (-total[name], name))
    )


class Others:
    """What other instances than one hold; their daemons are asked whenever it is iterated over."""

    def __init__(self, instance: InstancePaths) -> None:
        self._instance = instance

    def __iter__(self) -> Iterator[Holding]:
        ranks = [paths for paths in _ranks(self._instance.run) if self._is_other(paths.id)]
        if not ranks:
            return
        with ThreadPoolExecutor(min(_AT_ONCE, len(ranks))) as pool:
            for holdings in pool.map(_ask, ranks):
                yield from holdings

    def _is_other(self, rank_id: RankId) -> bool:
        return rank_id.instance != self._instance.instance


def _ranks(run: Path) -> Iterator[RankPaths]:
    """Every rank of every instance that has a socket below the run folder."""
    for socket in sorted(run.glob("*/control.sock")):
        try:
            yield RankPaths(RankId.parse(socket.parent.name), socket.parent)
        except UsageError:
            continue  # a supervisor's own folder


def _ask(paths: RankPaths) -> list[Holding]:
    """Nothing of a daemon that does not answer, or not to us: this only explains what is held."""
    try:
        report = ask(paths)
    except WcacheError:
        return []
    return held_by(paths.id, report) if report else []
