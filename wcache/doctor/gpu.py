"""Checks of the GPUs: driver, bindings, and modes that weights or engines do not survive."""

from collections.abc import Iterator
from importlib import metadata

from wcache.devices import Gpu
from wcache.doctor.evidence import Evidence
from wcache.doctor.finding import Finding, fail, ok, warn
from wcache.errors import WcacheError
from wcache.memory import driver

BINDINGS = "cuda-bindings"


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
                "wcache status" + (f" --instance {name}" if name else ""),
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
