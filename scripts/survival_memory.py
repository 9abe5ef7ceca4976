"""How much memory weights hold on this machine, whoever holds it: slabs of the run, or a GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from wcache.machine import devices
from wcache.units import MIB

# What a driver may keep for itself when the last context has gone.
_SLACK_BYTES = 64 * MIB
_SLAB = "/memfd:wcache-slab"


class Meter(Protocol):
    """What is looked at; ``what`` names it."""

    what: str

    def note(self, pid: int) -> None:
        """The slabs of this daemon belong to the run."""

    def used(self) -> int: ...

    def is_back_at(self, before: int) -> bool: ...

    def processes(self) -> tuple[int, ...]:
        """Those that the device's own tools would show."""


class SlabMeter:
    """Bytes of slabs that any process has open, systemd included."""

    what = "memory of slabs"

    def __init__(self, proc: Path) -> None:
        self._proc = proc
        self._noted: set[int] = set()

    def note(self, pid: int) -> None:
        self._noted |= {inode for inode, _ in _slabs(self._proc / str(pid))}

    def used(self) -> int:
        found = {slab for process in Path("/proc").glob("[0-9]*") for slab in _slabs(process)}
        return sum(nbytes for inode, nbytes in found if inode in self._noted)

    def is_back_at(self, before: int) -> bool:
        return self.used() <= before

    def processes(self) -> tuple[int, ...]:
        return ()


class GpuMeter:
    """What NVML says of the first GPU that the run can see."""

    def __init__(self) -> None:
        self._uuid = devices.visible_gpus()[0].uuid
        self.what = f"memory of {self._uuid}"

    def note(self, pid: int) -> None: ...

    def used(self) -> int:
        found = devices.gpu(self._uuid)
        return found.total_bytes - found.free_bytes

    def is_back_at(self, before: int) -> bool:
        return self.used() <= before + _SLACK_BYTES

    def processes(self) -> tuple[int, ...]:
        return devices.processes(self._uuid)


def meter(device: str, proc: Path) -> Meter:
    """``proc`` is the /proc in which daemons have the pids that they give."""
    return GpuMeter() if device == "cuda" else SlabMeter(proc)


def _slabs(process: Path) -> Iterator[tuple[int, int]]:
    """Inode and size of each slab that a process has open."""
    try:
        for entry in (process / "fd").iterdir():
            if str(entry.readlink()).startswith(_SLAB):
                status = entry.stat()
                yield status.st_ino, status.st_size
    except OSError:  # it has just ended
        return
