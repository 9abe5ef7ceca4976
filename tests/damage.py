"""Damaged bytes behind a rank's good digests, as broken memory would leave them."""

import secrets
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
import torch

from wcache.load.publish import hand_over
from wcache.manifest import Manifest
from wcache.memory.slab import Access
from wcache.paths import RankPaths
from wcache.protocol.control import Control
from wcache.protocol.messages import AskLoad, LoadOrder, LoadSource
from wcache.verify.held import held, mapped, memory_of

Damage = Callable[[Manifest, torch.Tensor], list[str]]
"""Changes bytes of the slabs, uint8[n], and returns the names of the tensors that have them."""


def publish_damaged(paths: RankPaths, damage: Damage) -> list[str]:
    """Replaces what the rank serves by a copy with ``damage`` and the same digests.

    Nobody can change a slab of the host's that is sealed: a writable map of it can neither be made
    nor kept over the sealing. So the copy's slabs are damaged through a writable map made for the
    purpose, after all digests were computed (they are the old manifest's), and sealed afterwards.
    """
    with held(paths) as one, mapped(one) as content, ExitStack() as stack:
        manifest = one.manifest()
        memory = memory_of(manifest.slabs[0])
        slabs = []
        for info in manifest.slabs:
            slabs.append(memory.create(info.nbytes))
            stack.callback(slabs[-1].close)
        mapping = memory.map(slabs, Access.WRITE)
        copy = mapping.tensor()
        copy.copy_(content)
        named = damage(manifest, copy)
        del copy
        mapping.close()
        for slab in slabs:
            memory.seal(slab)
        with Control.connect(paths, "loader") as control:
            source: LoadSource = "checkpoint"
            if manifest.fingerprint.loader == "publish":
                source = "engine"
            control.request(AskLoad(source=source, repair=True), LoadOrder)
            hand_over(control, slabs, msgspec.structs.replace(manifest, id=secrets.token_hex(16)))
    return named


def storage(manifest: Manifest, content: torch.Tensor, name: str) -> torch.Tensor:
    """uint8[n] over the storage of a tensor."""
    number = next(tensor.storage for tensor in manifest.tensors if tensor.name == name)
    run = manifest.storages[number]
    return content[run.offset : run.offset + run.nbytes]


def one_bit(manifest: Manifest, content: torch.Tensor) -> list[str]:
    name = "model.layers.1.mlp.down_proj.weight"
    storage(manifest, content, name)[1234] ^= 1
    return [name]


def two_signs(manifest: Manifest, content: torch.Tensor) -> list[str]:
    """Of bfloat16, so in the high byte of an element; a linear sum over words misses them."""
    name = "model.layers.0.self_attn.q_proj.weight"
    storage(manifest, content, name)[[7, 15]] ^= 0x80
    return [name]


def swapped_tensors(manifest: Manifest, content: torch.Tensor) -> list[str]:
    names = ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]
    first, second = (storage(manifest, content, name) for name in names)
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    return names


def swapped_chunks(manifest: Manifest, content: torch.Tensor) -> list[str]:
    name = "model.layers.1.self_attn.o_proj.weight"
    run = storage(manifest, content, name)
    half = run.numel() // 2
    run.copy_(torch.cat([run[half : 2 * half], run[:half], run[2 * half :]]))
    return [name]


def zeros(manifest: Manifest, content: torch.Tensor) -> list[str]:
    name = "model.norm.weight"
    storage(manifest, content, name).zero_()
    return [name]


def embedding(manifest: Manifest, content: torch.Tensor) -> list[str]:
    """A large change in what two tensors share, so that no logit stays the same."""
    run = storage(manifest, content, "model.embed_tokens.weight")
    run.copy_(run.roll(run.numel() // 2))
    return ["model.embed_tokens.weight"]
