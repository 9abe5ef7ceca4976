"""Modules and checkpoints in sealed slabs, as a loader would have put them there."""

import secrets
from collections.abc import Iterable
from typing import Any

import torch

from wcache.fingerprint import Fingerprint
from wcache.load.harvest import harvest
from wcache.manifest import Manifest, Storage, check
from wcache.memory import open_memory
from wcache.memory.slab import Access, Mapping, Slab, slab_sizes

FINGERPRINT = Fingerprint(model="test-model", loader="publish", device="cpu", tp_size=1)


def cached(
    module: torch.nn.Module,
    *,
    fingerprint: Fingerprint = FINGERPRINT,
    extras: dict[str, Any] | None = None,
    slab_bytes: int = 2 << 20,
) -> tuple[Manifest, list[Slab]]:
    """The manifest of ``module`` and sealed host slabs with its bytes, which the caller closes."""
    taken = harvest(module)
    memory = open_memory("cpu")
    sizes = slab_sizes(taken.total_bytes, slab_bytes, memory.granularity)
    slabs = [memory.create(nbytes) for nbytes in sizes]
    mapping = memory.map(slabs, Access.WRITE)
    content = mapping.tensor()
    for source in taken.sources:
        content[source.offset : source.offset + source.nbytes].copy_(source.content())
    del content
    mapping.close()
    for slab in slabs:
        memory.seal(slab)
    manifest = Manifest(
        id=secrets.token_hex(16),
        fingerprint=fingerprint,
        slabs=tuple(slab.info for slab in slabs),
        storages=tuple(Storage(s.offset, s.nbytes, "test:00") for s in taken.sources),
        tensors=taken.tensors,
        extras=extras or {},
    )
    check(manifest, range_bytes=sum(sizes))
    return manifest, slabs


def mapped(manifest: Manifest, slabs: Iterable[Slab], access: Access = Access.READ) -> Mapping:
    """Maps ``slabs`` and closes this process's descriptors of them."""
    held = list(slabs)
    mapping = open_memory("cpu").map(held, access)
    for slab in held:
        slab.close()
    return mapping


class Holder(torch.nn.Module):
    """Tensors under chosen dotted names, as a checkpoint has them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, leaf = name.split(".")
            owner: torch.nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, torch.nn.Module())
                child = owner._modules[part]
                assert child is not None
                owner = child
            owner.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
