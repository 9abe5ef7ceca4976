"""Looks for what is wrong, or will be: the list of checks, and all of them run."""

from collections.abc import Callable, Iterator
from functools import partial

import msgspec

import wcache
from wcache.doctor.evidence import Evidence, Machine, Manager, gather
from wcache.doctor.finding import Diagnosis, Finding
from wcache.doctor.gpu import (
    check_bindings,
    check_claims,
    check_driver,
    check_modes,
    check_persistence,
    check_unified_memory,
)
from wcache.doctor.memory import (
    check_disk,
    check_hugepages,
    check_memlock,
    check_room,
    check_shm,
)
from wcache.doctor.model import (
    check_checkpoint,
    check_clock,
    check_configuration,
    check_transformers,
)
from wcache.doctor.ranks import check_descriptors, check_leftovers, check_ranks, check_supervisor
from wcache.doctor.service import (
    check_boot,
    check_folders,
    check_group,
    check_linger,
    check_systemd,
    check_units,
)
from wcache.doctor.state import check_state
from wcache.hints import for_instance
from wcache.install import Planned

__all__ = [
    "CHECKS",
    "Check",
    "Diagnosis",
    "Evidence",
    "Finding",
    "Machine",
    "Manager",
    "diagnose",
    "gather",
]

Check = Callable[[Evidence], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    check_linger,
    check_boot,
    check_group,
    check_folders,
    check_configuration,
    check_ranks,
    check_supervisor,
    check_descriptors,
    check_leftovers,
    check_checkpoint,
    check_clock,
    check_room,
    check_hugepages,
    check_shm,
    check_memlock,
    check_disk,
    check_state,
    check_driver,
    check_unified_memory,
    check_bindings,
    check_persistence,
    check_modes,
    check_claims,
    check_transformers,
)


def diagnose(evidence: Evidence, planned: list[Planned]) -> Diagnosis:
    """Runs every check; ``planned`` are the units as this wcache would install them."""
    checks: list[Check] = [check_systemd, partial(check_units, planned=planned), *CHECKS]
    instance = evidence.instance.instance
    findings = tuple(
        msgspec.structs.replace(finding, mend=for_instance(finding.mend, instance))
        for check in checks
        for finding in check(evidence)
    )
    return Diagnosis(wcache=wcache.__version__, instance=instance, findings=findings)
