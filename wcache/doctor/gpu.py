"""Checks of the GPUs: driver, bindings, and modes that weights or engines do not survive."""

import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from wcache.doctor.evidence import Evidence
from wcache.doctor.finding import Finding, fail, ok, warn
from wcache.errors import WcacheError
from wcache.machine.devices import Gpu
from wcache.memory import driver

BINDINGS = "cuda-bindings"
UVM, UVM_MODULE, UVM_DEVICE = "nvidia-uvm", "nvidia_uvm", "nvidia-uvm"


def check_driver(evidence: Evidence) -> Iterator[Finding]:
    if evidence.driver_fault:
        yield fail("driver", evidence.driver_fault, "nvidia-smi")
        return
    if not evidence.gpus:
        if evidence.wants_gpus:
            yield fail(
                "driver", "NVML shows no GPU, and the configuration wants some", "nvidia-smi"
            )
        else:
            yield ok("driver", "no NVIDIA GPU here: weights are kept in host memory")
        return
    known = {gpu.uuid for gpu in evidence.gpus}
    for uuid in evidence.config.memory.devices if evidence.config else ():
        if uuid not in known:
            yield fail(
                "driver", f"there is no GPU {uuid} any more", "wcache up --model … chooses again"
            )
    yield ok("driver", f"{evidence.driver} with {_gpus(len(evidence.gpus))}")


def check_bindings(evidence: Evidence) -> Iterator[Finding]:
    """cuda-bindings, and whether the driver starts with them; makes no context."""
    if not evidence.gpus and not evidence.wants_gpus:
        return
    bad = fail if evidence.wants_gpus else warn
    try:
        version = metadata.version(BINDINGS)
    except metadata.PackageNotFoundError:
        yield bad(BINDINGS, "not installed: no weights on GPUs", "pip install 'wcache[cuda]'")
        return
    try:
        shown = driver.device_ordinals()
    except WcacheError as error:
        yield bad(BINDINGS, f"{version}: {error.message}", error.hint or "nvidia-smi")
        return
    absent = [gpu.uuid for gpu in evidence.gpus if gpu.uuid not in shown and not gpu.mig]
    if absent:
        yield warn(
            BINDINGS,
            f"{version}: the driver does not show {', '.join(absent)}",
            "unset CUDA_VISIBLE_DEVICES",
        )
    else:
        yield ok(BINDINGS, f"{version}, the driver answers")


def check_unified_memory(evidence: Evidence) -> Iterator[Finding]:
    """CUDA does not start without the module nvidia-uvm and its device file.

    Root's first CUDA process loads the one and makes the other, by a setuid nvidia-modprobe where
    there is one. A loader that systemd starts can not: it gains no privileges, and loads no module.
    """
    machine = evidence.machine
    if not evidence.gpus and not (machine.dev / "nvidia0").exists():
        return
    has_device = (machine.dev / UVM_DEVICE).exists()
    loaded = _has_module(machine.modules)
    if has_device and loaded is not False:
        yield ok(UVM, "loaded, and its device file is there")
        return
    bad = fail if evidence.wants_gpus else warn
    absent = f"{machine.dev / UVM_DEVICE} is not there"
    what = "the module is not loaded" if loaded is False else absent
    yield bad(UVM, f"{what}: CUDA does not start in a loader under systemd", _load_uvm())


def _has_module(modules: Path) -> bool | None:
    """None where the kernel does not say: in a container, or with the driver built in."""
    try:
        lines = modules.read_text(errors="replace").splitlines()
    except OSError:
        return None
    names = {line.partition(" ")[0] for line in lines}
    # A list without any of the driver's modules is that of another kernel.
    if not any(name == "nvidia" or name.startswith("nvidia_") for name in names):
        return None
    return UVM_MODULE in names


def _load_uvm() -> str:
    """nvidia-modprobe makes the device file too; modprobe leaves that to udev."""
    return "nvidia-modprobe -u -c 0" if shutil.which("nvidia-modprobe") else "modprobe nvidia-uvm"


def check_persistence(evidence: Evidence) -> Iterator[Finding]:
    """Without it the device is torn down with its last user, and exported memory with it.

    nvidia-persistenced turns the mode on that NVML shows, so it needs no look of its own.
    """
    for gpu in evidence.gpus:
        bad = fail if _is_used(evidence, gpu) else warn
        if gpu.persistence is False:
            yield bad(
                "persistence",
                f"off on GPU {gpu.index}: weights are lost when its last user ends",
                f"nvidia-smi -i {gpu.index} -pm 1",
            )
        elif gpu.persistence is None:
            yield warn(
                "persistence",
                f"the driver does not say for GPU {gpu.index}",
                f"nvidia-smi -i {gpu.index} -pm 1",
            )
    if evidence.gpus and all(gpu.persistence for gpu in evidence.gpus):
        yield ok("persistence", f"on, {_gpus(len(evidence.gpus))}")


def check_modes(evidence: Evidence) -> Iterator[Finding]:
    found = [finding for gpu in evidence.gpus for finding in _modes(evidence, gpu)]
    if evidence.gpus and (evidence.machine.mps_pipes / "control").exists():
        found.append(
            warn(
                "GPU modes",
                "an MPS server runs: loader and engines share its context, and a fault of one ends"
                " all of them",
                "echo quit | nvidia-cuda-mps-control",
            )
        )
    if evidence.gpus:
        yield from found or [ok("GPU modes", "no MIG, no exclusive mode, no MPS")]


def check_claims(evidence: Evidence) -> Iterator[Finding]:
    """GPUs that another instance's configuration names as well."""
    own = set(evidence.config.memory.devices) if evidence.config else set()
    for name, config in evidence.others.items():
        for uuid in sorted(own & set(config.memory.devices)):
            yield warn(
                "GPUs",
                f"{uuid} is also named by the instance {name or 'default'}: both must fit",
                "wcache status" + (f" --instance {name}" if name else ", without --instance"),
            )


def _modes(evidence: Evidence, gpu: Gpu) -> Iterator[Finding]:
    bad = fail if _is_used(evidence, gpu) else warn
    if gpu.mig:
        yield bad(
            "GPU modes",
            f"GPU {gpu.index} is cut into MIG instances, which wcache does not use",
            f"nvidia-smi -i {gpu.index} -mig 0",
        )
    if gpu.compute_mode == "exclusive":
        yield warn(
            "GPU modes",
            f"GPU {gpu.index} takes one process: no load beside an engine",
            f"nvidia-smi -i {gpu.index} -c DEFAULT",
        )
    elif gpu.compute_mode == "prohibited":
        yield bad(
            "GPU modes",
            f"GPU {gpu.index} takes no process at all",
            f"nvidia-smi -i {gpu.index} -c DEFAULT",
        )


def _is_used(evidence: Evidence, gpu: Gpu) -> bool:
    return evidence.config is not None and gpu.uuid in evidence.config.memory.devices


def _gpus(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"
