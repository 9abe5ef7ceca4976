"""Which GPUs an engine is shown, so that each of its ranks runs where the rank's weights are."""

import os
from collections.abc import Mapping, Sequence

from wcache.errors import UsageError
from wcache.machine.devices import VISIBLE, Gpu, select

ORDER = "CUDA_DEVICE_ORDER"
_BY_ADDRESS = "PCI_BUS_ID"


def shown(
    holders: Sequence[str], present: tuple[Gpu, ...], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables to add, for an engine that runs rank n on the nth GPU that it sees.

    ``holders`` are the UUIDs of the GPUs that hold the ranks, in their order, and ``present`` is
    every GPU of the machine. Nothing is added where the ranks meet their weights without it, and
    where a GPU is missing: the engine finds that out itself.

    Raises :class:`UsageError` when the operator has chosen other GPUs, or another order: mapping a
    rank's weights into a process that computes on another GPU would be slow, or fail.
    """
    said = environment.get(VISIBLE)
    visible = present if said is None else select(present, said)
    seen = [gpu.uuid for gpu in visible[: len(holders)]]
    indices = {gpu.uuid: gpu.index for gpu in present}
    if seen == list(holders) or not all(uuid in indices for uuid in holders):
        return {}
    wanted = ",".join(str(indices[uuid]) for uuid in holders)
    if said is None and environment.get(ORDER, _BY_ADDRESS) == _BY_ADDRESS:
        return {VISIBLE: wanted, ORDER: _BY_ADDRESS}
    rank = next(n for n, uuid in enumerate(holders) if seen[n : n + 1] != [uuid])
    told = seen[rank] if rank < len(seen) else "no GPU"
    setting = f"{ORDER}={environment[ORDER]}" if said is None else f"{VISIBLE}={said}"
    raise UsageError(
        f"{setting} gives the engine's rank {rank} {told}, and its weights are on {holders[rank]}",
        hint=f"{VISIBLE}={wanted} {ORDER}={_BY_ADDRESS}, or unset both: wcache run sets them",
    )
