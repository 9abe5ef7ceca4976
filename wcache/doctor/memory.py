"""Checks of room: for the weights that are still to be loaded, in pages, limits and on disks."""

import os
import resource
import shlex
from collections.abc import Iterator
from math import prod

from wcache.checkpoint import Checkpoint
from wcache.checkpoint.ties import HEAD
from wcache.config import Config
from wcache.doctor.evidence import Evidence
from wcache.doctor.finding import Finding, fail, ok, warn
from wcache.fp8 import is_whole
from wcache.load.placement import CONVERTIBLE, DTYPES
from wcache.manifest import DTYPE_BYTES
from wcache.memory.available import HUGEPAGE_BYTES, available_bytes, free_hugepage_bytes
from wcache.ranks import rank_words
from wcache.units import GIB, MIB, size

# Docker gives a container 64 MiB, with which NCCL's rings of a tensor-parallel group do not start.
SHM_BYTES = 1 * GIB
# What registered memory of an engine (RDMA, io_uring on older kernels) counts against.
MEMLOCK_BYTES = 64 * MIB
# A log has about 8 MiB; less than a page for each of a rank's files is as good as nothing.
LITTLE_BYTES, NOTHING_BYTES = 8 * MIB, 64 << 10


def rank_bytes(checkpoint: Checkpoint, config: Config) -> int:
    """About what one rank takes: an even share of the weights in their final dtype.

    The exact plan needs transformers, which imports torch, where weights are sharded.
    """
    wanted = DTYPES.get(config.model.dtype)
    to_fp8 = config.model.quantization == "fp8"
    total = 0
    for name, entry in checkpoint.tensors.items():
        if to_fp8 and entry.dtype in CONVERTIBLE and _is_linear(name, entry.shape):
            total += prod(entry.shape)
            continue
        converted = wanted is not None and entry.dtype in CONVERTIBLE
        kept = wanted if converted and wanted else entry.dtype
        total += entry.nbytes * DTYPE_BYTES[kept] // DTYPE_BYTES[entry.dtype]
    return -(-total // (config.layout.tp * config.layout.pp))


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether FP8 is likely to be made of it: transformers alone knows."""
    return is_whole(shape) and name != HEAD and "embed" not in name


def check_room(evidence: Evidence) -> Iterator[Finding]:
    config, checkpoint, waiting = evidence.config, evidence.checkpoint, evidence.waiting()
    if config is None or not isinstance(checkpoint, Checkpoint):
        return
    if not waiting:
        yield ok("room", "every rank of the configuration has its weights")
        return
    share = rank_bytes(checkpoint, config)
    if config.memory.device == "cuda":
        yield from _gpu_room(evidence, config, waiting, share)
        return
    free = available_bytes(evidence.machine.meminfo)
    if config.memory.hugepages:
        free += free_hugepage_bytes(evidence.machine.hugepages)
    yield _compared("room", "memory", waiting, share * len(waiting), free, "free -h")


def check_hugepages(evidence: Evidence) -> Iterator[Finding]:
    config, checkpoint, waiting = evidence.config, evidence.checkpoint, evidence.waiting()
    if config is None or config.memory.device != "cpu" or not config.memory.hugepages:
        return
    free = free_hugepage_bytes(evidence.machine.hugepages)
    if not waiting or not isinstance(checkpoint, Checkpoint):
        yield ok("hugepages", f"{size(free)} in free pages of 2 MiB")
        return
    needed = rank_bytes(checkpoint, config) * len(waiting)
    if free >= needed:
        yield ok("hugepages", f"{size(free)} in free pages of 2 MiB, about {size(needed)} needed")
        return
    more = -(-(needed - free) // HUGEPAGE_BYTES)
    yield warn(
        "hugepages",
        f"{size(free)} is free in pages of 2 MiB, about {size(needed)} needed: the rest takes"
        " ordinary pages",
        f"sysctl vm.nr_hugepages=$(($(sysctl -n vm.nr_hugepages) + {more}))",
    )


def check_shm(evidence: Evidence) -> Iterator[Finding]:
    """wcache's own slabs do not count against /dev/shm; what engines exchange does."""
    folder = evidence.machine.shm
    spread = evidence.config is not None and evidence.config.ranks.world_size > 1
    try:
        status = os.statvfs(folder)
    except OSError:
        yield warn("/dev/shm", f"{folder} is not there", f"mount -t tmpfs tmpfs {folder}")
        return
    total = status.f_blocks * status.f_frsize
    if spread and total < SHM_BYTES:
        yield warn(
            "/dev/shm",
            f"{size(total)}: engines of several ranks exchange data there and may not start",
            f"mount -o remount,size=8G {folder}, or docker run --shm-size 8g",
        )
    else:
        yield ok("/dev/shm", size(total))


def check_disk(evidence: Evidence) -> Iterator[Finding]:
    """Room where ready files, the configuration and logs are written; serving needs none."""
    instance = evidence.instance
    found = []
    for what, folder in (
        ("ready files", instance.run),
        ("the configuration", instance.config),
        ("logs", instance.state),
    ):
        try:
            there = next(path for path in (folder, *folder.parents) if path.exists())
            status = os.statvfs(there)
        except OSError:
            continue  # not for us to look at; the checks of folders say so
        named = shlex.quote(str(there))
        free = status.f_frsize * (status.f_bavail if os.geteuid() else status.f_bfree)
        left, mend = size(free), f"df {named} shows it: make room there"
        if status.f_files and not (status.f_favail if os.geteuid() else status.f_ffree):
            free, left, mend = 0, "no inode", f"df -i {named} shows it: remove files there"
        if status.f_flag & os.ST_RDONLY:
            detail = f"{folder} is on a read-only file system: {what} can not be written"
            found.append(warn("disk", detail, f"findmnt -T {named} shows it"))
        elif free < NOTHING_BYTES:
            found.append(fail("disk", f"{folder} has no room for {what}: {left} is free", mend))
        elif free < LITTLE_BYTES:
            found.append(warn("disk", f"{folder} has little room for {what}: {left} is free", mend))
    yield from found or [ok("disk", "room for ready files, the configuration and logs")]


def check_memlock(evidence: Evidence) -> Iterator[Finding]:
    """Of this process, and so of an engine that is started in the same way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield ok("memlock", "unlimited")
    elif soft >= MEMLOCK_BYTES or not evidence.wants_gpus:
        yield ok("memlock", size(soft))
    else:
        enough = hard == resource.RLIM_INFINITY or hard >= MEMLOCK_BYTES
        yield warn(
            "memlock",
            f"{size(soft)}: an engine that registers memory for its network may not start",
            f"ulimit -l {'unlimited' if hard == resource.RLIM_INFINITY else hard // 1024}"
            if enough
            else "LimitMEMLOCK=infinity in the engine's unit",
        )


def _gpu_room(
    evidence: Evidence, config: Config, waiting: list[int], share: int
) -> Iterator[Finding]:
    free = {gpu.uuid: (gpu.index, gpu.free_bytes) for gpu in evidence.gpus}
    by_gpu: dict[str, list[int]] = {}
    for rank in waiting:
        place = config.ranks.coordinates(rank).local_rank
        by_gpu.setdefault(config.memory.devices[place], []).append(rank)
    for uuid, ranks in by_gpu.items():
        if uuid in free:  # one that is gone is told of with the driver
            index, nbytes = free[uuid]
            yield _compared(
                "room", f"memory of GPU {index}", ranks, share * len(ranks), nbytes, "nvidia-smi"
            )


def _compared(
    check: str, place: str, ranks: list[int], needed: int, free: int, mend: str
) -> Finding:
    words = f"{rank_words(ranks)} {'needs' if len(ranks) == 1 else 'need'} about {size(needed)}"
    if needed <= free:
        return ok(check, f"{words}, {size(free)} of {place} is free")
    return fail(check, f"{words}, only {size(free)} of {place} is free", f"{mend} shows who has it")
