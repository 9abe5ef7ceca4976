"""What ``status`` shows of the GPUs that weights lie on: who holds their memory, and how much."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from wcache.config import Config
from wcache.errors import WcacheError
from wcache.output import Table
from wcache.paths import InstancePaths, RankId
from wcache.ranks import RankView
from wcache.units import size

if TYPE_CHECKING:
    from wcache.holdings import Holding
    from wcache.machine.devices import Gpu


class GpuStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of this instance."""

    uuid: str
    index: int | None = None
    """NVML's, as nvidia-smi counts; None for a GPU that NVML does not show, like all below."""
    total_bytes: int | None = None
    used_bytes: int | None = None
    """By everybody, as nvidia-smi shows it."""
    held_bytes: int = 0
    """By this instance's weights, in all generations."""
    others_bytes: int = 0
    """By the weights of other instances whose daemons could be asked."""
    ranks: tuple[int, ...] = ()
    """This instance's, that hold something here or are to."""
    nvidia_smi_process: bool = False
    """Whether nvidia-smi names a process for held bytes: never, they are held by descriptors."""


def gpus_of(
    instance: InstancePaths, views: Mapping[int, RankView], config: Config | None
) -> tuple[GpuStatus, ...]:
    """Asks NVML and the other instances, where any weights of this one are on a GPU."""
    if not _any(views, config):
        return ()
    # Most instances are on one kind of device, and a status is to be quick.
    from wcache.holdings import Others
    from wcache.machine import devices

    found = rows(instance.instance, views, config)
    try:
        present = devices.gpus()
    except WcacheError:
        present = ()  # doctor says what is wrong with NVML; who holds how much is known without it
    return merge(found, present, Others(instance))


def _any(views: Mapping[int, RankView], config: Config | None) -> bool:
    held = (one.report.generations for one in views.values() if one.report)
    on_gpu = any(generation.fingerprint.device_uuid for of in held for generation in of)
    return on_gpu or (config is not None and bool(config.memory.devices))


def rows(
    instance: str, views: Mapping[int, RankView], config: Config | None
) -> tuple[GpuStatus, ...]:
    """Pure. What daemons hold of each GPU, and the GPUs that the configuration names."""
    from wcache.holdings import held_by

    held: dict[str, int] = {}
    ranks: dict[str, set[int]] = {}
    for rank, one in views.items():
        if config and config.memory.devices and rank in config.ranks.local_ranks():
            place = config.ranks.coordinates(rank).local_rank
            ranks.setdefault(config.memory.devices[place], set()).add(rank)
        for holding in held_by(RankId(instance, rank), one.report) if one.report else ():
            if holding.device.startswith("GPU-"):
                held[holding.device] = held.get(holding.device, 0) + holding.nbytes
                ranks.setdefault(holding.device, set()).add(rank)
    return tuple(
        GpuStatus(uuid=uuid, held_bytes=held.get(uuid, 0), ranks=tuple(sorted(of)))
        for uuid, of in ranks.items()
    )


def merge(
    found: Iterable[GpuStatus], present: Sequence["Gpu"], others: Iterable["Holding"]
) -> tuple[GpuStatus, ...]:
    """Pure. ``found`` with what NVML and other instances tell, in NVML's order."""
    shown = {gpu.uuid: gpu for gpu in present}
    elsewhere: dict[str, int] = {}
    for holding in others:
        elsewhere[holding.device] = elsewhere.get(holding.device, 0) + holding.nbytes
    merged = []
    for row in found:
        row = msgspec.structs.replace(row, others_bytes=elsewhere.get(row.uuid, 0))
        if gpu := shown.get(row.uuid):
            row = msgspec.structs.replace(
                row, index=gpu.index, total_bytes=gpu.total_bytes,
                used_bytes=gpu.total_bytes - gpu.free_bytes,
            )  # fmt: skip
        merged.append(row)
    return tuple(sorted(merged, key=lambda row: (row.index is None, row.index, row.uuid)))


def table(found: Iterable[GpuStatus]) -> Table:
    shown = Table(">GPU", "RANKS", ">HELD", ">OTHERS HOLD", ">IN USE", ">OF", "UUID")
    for row in found:
        shown.add(
            row.index,
            ",".join(map(str, row.ranks)),
            size(row.held_bytes),
            size(row.others_bytes),
            None if row.used_bytes is None else size(row.used_bytes),
            None if row.total_bytes is None else size(row.total_bytes),
            row.uuid,
        )
    return shown


def note(found: Iterable[GpuStatus]) -> str:
    """What nvidia-smi does not say; empty where nothing is held on a GPU."""
    held = sum(row.held_bytes for row in found)
    if not held:
        return ""
    return (
        f"nvidia-smi shows no process for the {size(held)} held on GPUs: descriptors of daemons and"
        " supervisor hold them, wcache down frees them"
    )
