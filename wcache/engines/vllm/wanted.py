"""Which weights one rank of a running vLLM wants: its place, its fingerprint, its checkpoint."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from wcache import gate
from wcache.checkpoint import Checkpoint, Identity, identify, open_checkpoint
from wcache.engines.orders import Orders
from wcache.errors import CheckpointError, UnsupportedQuantForIPCError
from wcache.fingerprint import Fingerprint, digest_of
from wcache.hub import resolve_model
from wcache.load.harvest import as_table
from wcache.paths import RankId
from wcache.switches import set_here

ENGINE = "vllm"

_FLOATS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What one rank asks its daemon for."""

    rank: RankId
    device: torch.device
    fingerprint: Fingerprint
    checkpoint: Checkpoint
    identity: Identity
    shard_bytes: int
    """About what the weights of this rank take when they are loaded from disk."""


def device_of(vllm_config: Any) -> torch.device:
    """Where this rank's weights belong, with its index where there are several."""
    device = torch.device(vllm_config.load_config.device or vllm_config.device_config.device)
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def rank_of(vllm_config: Any, orders: Orders) -> RankId:
    """The rank as wcache numbers it: tp fastest, then pp, then dp, as vLLM does itself."""
    tp, pp = _places()
    parallel = vllm_config.parallel_config
    replica = _replica(parallel)
    return RankId(orders.instance, (replica * pp[1] + pp[0]) * tp[1] + tp[0])


def wanted_by(vllm_config: Any, orders: Orders) -> Wanted:
    """Looks at the checkpoint, without reading its weights, and at what vLLM will make of it.

    Raises :class:`CheckpointError` for a checkpoint that can not be told from another one, and
    :class:`UnsupportedQuantForIPCError` for weights that the gate refuses.
    """
    model = vllm_config.model_config
    checkpoint, identity = _identified(_folder(model))
    quantization = gate.check(checkpoint)
    _check_method(vllm_config.quant_config, quantization.method, str(checkpoint.path))
    device = device_of(vllm_config)
    (tp_rank, tp), (pp_rank, pp) = _places()
    known: dict[str, Any] = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        known = {
            "device_uuid": f"GPU-{properties.uuid}",
            "device_capability": f"{properties.major}.{properties.minor}",
        }
    if quantization.settings is not None:
        known["quantization_config"] = digest_of(quantization.settings)
    parallel = vllm_config.parallel_config
    if getattr(parallel, "enable_expert_parallel", False):
        known |= {"ep_size": tp * parallel.data_parallel_size}
        known |= {"ep_rank": _replica(parallel) * tp + tp_rank}
    import vllm

    fingerprint = Fingerprint(
        content=identity.digest,
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=quantization.method,
        tp_size=tp, tp_rank=tp_rank, pp_size=pp, pp_rank=pp_rank,
        device="cuda" if device.type == "cuda" else "cpu",
        torch_version=str(torch.__version__),
        engine=ENGINE,
        engine_version=str(vllm.__version__),
        switches=_switches(vllm_config, device),
        **known,
    )  # fmt: skip
    return Wanted(
        rank=rank_of(vllm_config, orders),
        device=device,
        fingerprint=fingerprint,
        checkpoint=checkpoint,
        identity=identity,
        shard_bytes=_bytes_in(checkpoint, model.dtype) // (tp * pp),
    )


def _places() -> tuple[tuple[int, int], tuple[int, int]]:
    """(rank, size) in the tensor-parallel and in the pipeline-parallel group."""
    from vllm.distributed import get_pp_group, get_tp_group

    groups = get_tp_group(), get_pp_group()
    first, second = ((group.rank_in_group, group.world_size) for group in groups)
    return first, second


def _replica(parallel: Any) -> int:
    # A dense model's replicas are told that they are alone; the index goes on counting them.
    return int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank))


def _folder(model: Any) -> Path:
    if getattr(model, "model_weights", "") not in ("", model.model):
        raise CheckpointError(f"the weights of {model.model} are streamed, and lie in no folder")
    return resolve_model(str(model.model), model.revision).path


@lru_cache(maxsize=2)
def _identified(folder: Path) -> tuple[Checkpoint, Identity]:
    # Asked for twice in a start: for the memory budget, and for the load.
    checkpoint = open_checkpoint(folder)
    return checkpoint, identify(checkpoint)


def _check_method(quant_config: Any, of_checkpoint: str, source: str) -> None:
    """The engine must not quantize on its way what the checkpoint has as it is."""
    asked = "none" if quant_config is None else gate.check_settings(as_table(quant_config), source)
    if asked != of_checkpoint:
        raise UnsupportedQuantForIPCError(
            f"{source} is quantized with {of_checkpoint!r}, and vllm is to make {asked!r} of it",
            method=asked,
            hint="leave --quantization out, or take a checkpoint that is quantized already",
        )


def _switches(vllm_config: Any, device: torch.device) -> dict[str, str]:
    """The environment's, and what vLLM was told or has chosen, under the names of its options."""
    model, overrides = vllm_config.model_config, vllm_config.model_config.hf_overrides
    kernels = getattr(vllm_config, "kernel_config", None)
    attention = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    settings = {
        "--linear-backend": getattr(kernels, "linear_backend", None),
        "--moe-backend": getattr(kernels, "moe_backend", None),
        "--attention-backend": getattr(attention, "name", attention),
        "--kv-cache-dtype": vllm_config.cache_config.cache_dtype,
        "--model-impl": getattr(model.model_impl, "value", model.model_impl),
        "--convert": model.convert_type,
        "--hf-overrides": digest_of(overrides) if isinstance(overrides, dict) else repr(overrides),
        "cpu-gemm": "unpacked" if device.type == "cpu" else None,
    }
    if overrides == {}:
        del settings["--hf-overrides"]
    return set_here(ENGINE, settings)


def _bytes_in(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Of all tensors, the floating-point ones in the dtype to which vLLM converts them."""
    total = 0
    for entry in checkpoint.tensors.values():
        width = _FLOATS.get(entry.dtype)
        total += entry.nbytes if width is None else entry.nbytes // width * dtype.itemsize
    return total


def is_same_model(configured: str, model: Any) -> bool:
    """Whether an instance that waits for ``configured`` waits for what this engine loads."""
    names = {str(model.model)}
    served = getattr(model, "served_model_name", None)
    names |= {served} if isinstance(served, str) else set(served or ())
    if configured in names:
        return True
    one, other = Path(configured).expanduser(), Path(str(model.model)).expanduser()
    return one.is_dir() and other.is_dir() and one.samefile(other)
