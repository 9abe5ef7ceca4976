"""What tests of the loader share: a Llama's parallel plan, and the daemon's end of a load."""

import os
from types import TracebackType
from typing import TypeVar

import msgspec
import torch

from wcache import manifest as manifests
from wcache.config import Config
from wcache.daemon.generation import Generation, accept
from wcache.load.parallel import ParallelPlan
from wcache.manifest import MAX_MANIFEST_BYTES, Manifest
from wcache.memory import open_memory
from wcache.memory.dtypes import TORCH_DTYPES
from wcache.memory.memfd import read_sealed
from wcache.memory.slab import Access, Slab
from wcache.protocol.messages import (
    AskLoad,
    LoadFailed,
    LoadOrder,
    Message,
    NothingToLoad,
    Progress,
    Publish,
    Published,
    Request,
)

R = TypeVar("R", bound=Message)

LLAMA = ParallelPlan(
    architecture="LlamaForCausalLM",
    prefix="model",
    base={
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    },
    head={"lm_head": "colwise_gather_output"},
    stages=("embed_tokens", "layers", "norm"),
    head_stages=("lm_head",),
    attention_heads=(6,),
    kv_heads=(3,),
)
EMBEDDING = "model.embed_tokens.weight"


def manifest_of(generation: Generation) -> Manifest:
    """What a client would read of it."""
    return manifests.decode(read_sealed(generation.manifest_fd, MAX_MANIFEST_BYTES))


class Daemon:
    """Answers a loader as :mod:`wcache.daemon` does, and keeps what it was told."""

    def __init__(self, config: Config, *, wants: bool = True) -> None:
        self.config = config
        self.wants = wants
        self.progress: list[Progress] = []
        self.failures: list[LoadFailed] = []
        self._generation: Generation | None = None

    @property
    def generation(self) -> Generation:
        assert self._generation is not None, "nothing was published"
        return self._generation

    def request(self, message: Request, kind: type[R], fds: list[int] | None = None) -> R:
        reply: Message
        if isinstance(message, AskLoad):
            reply = (
                LoadOrder(generation=1, config=self.config)
                if self.wants
                else NothingToLoad(message="rank 0 holds generation 1")
            )
        else:
            assert isinstance(message, Publish)
            copies = [os.dup(fd) for fd in fds or ()]
            self._generation = accept(1, "loaded", copies, message.slabs)
            reply = Published(generation=1)
        assert isinstance(reply, kind)
        return reply

    def tell(self, message: Request) -> None:
        # As it would travel: what can not be encoded can not be told.
        msgspec.json.encode(message)
        if isinstance(message, Progress):
            self.progress.append(message)
        elif isinstance(message, LoadFailed):
            self.failures.append(message)

    def take_fds(self, count: int) -> list[int]:
        raise AssertionError(f"{count} descriptors are asked for, and none were handed over")

    def __enter__(self) -> "Daemon":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._generation is not None:
            self._generation.close()


def tensors_of(generation: Generation) -> dict[str, torch.Tensor]:
    """The tensors of a host generation, mapped as a client maps them."""
    manifest = manifest_of(generation)
    slabs = [
        Slab(os.dup(fd), info) for fd, info in zip(generation.slab_fds, manifest.slabs, strict=True)
    ]
    mapping = open_memory("cpu").map(slabs, Access.PRIVATE)
    content = mapping.tensor()
    mapping.close()
    for slab in slabs:
        slab.close()
    tensors = {}
    for tensor in manifest.tensors:
        storage = manifest.storages[tensor.storage]
        # A storage of its own over the run, so that offsets count from its start.
        run = content[storage.offset : storage.offset + storage.nbytes]
        base = (
            torch.frombuffer(run.numpy(), dtype=torch.uint8) if storage.nbytes else run[:0].clone()
        )
        typed = base.view(TORCH_DTYPES[tensor.dtype])
        tensors[tensor.name] = typed.as_strided(tensor.shape, tensor.stride, tensor.storage_offset)
    return tensors
