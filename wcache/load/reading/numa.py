"""Threads, and with them the memory that they touch first, beside a GPU."""

import os
from pathlib import Path

_DEVICES = Path("/sys/bus/pci/devices")


def bind_near(pci_address: str, devices: Path = _DEVICES) -> None:
    """Keeps the calling thread on the CPUs of the GPU's NUMA node, of those that it may use.

    ``pci_address`` is as sysfs has it, ``0000:3b:00.0``. Does nothing where sysfs does not tell,
    or where none of those CPUs is for this process.
    """
    try:
        text = (devices / pci_address / "local_cpulist").read_text()
    except OSError:
        return
    near = cpus(text) & os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)  # 0: this thread


def cpus(text: str) -> set[int]:
    """``0-3,8`` as the kernel writes a list of CPUs; what is not a number is passed over."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            found.update(range(int(first), int(last or first) + 1))
    return found
