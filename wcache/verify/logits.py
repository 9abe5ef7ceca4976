"""The check of what a model computes: logits of the cached weights against a fresh model's."""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wcache import gate
from wcache.checkpoint import open_checkpoint
from wcache.errors import WcacheError
from wcache.fingerprint import Fingerprint
from wcache.fp8 import WEIGHT_DTYPE
from wcache.machine import devices
from wcache.manifest import Manifest
from wcache.memory.available import available_bytes
from wcache.paths import RankId
from wcache.units import size
from wcache.verify.fp8_logits import from_fp8_checkpoint, multiply_out, round_as_fp8
from wcache.verify.held import gpu_room
from wcache.verify.result import Outcome, Progress, Result

if TYPE_CHECKING:
    import torch
    import transformers

PROMPT = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597)
"""Token ids, modulo the size of the vocabulary: no tokenizer is needed."""

# Activations, and what the allocators round up.
_SPARE = 1.25


def logits(rank_id: RankId, manifest: Manifest, folder: Path | None, progress: Progress) -> Result:
    """Runs the prompt through both models, one after the other, where the weights are.

    On the CPU the two must agree bit for bit. A GPU's libraries choose their kernels anew in every
    run, so a difference there is told with its size, as a warning.
    """
    reason = _why_not(manifest, folder)
    if reason or folder is None:
        return _result(rank_id, "skipped", reason)
    progress("logits", 0, 0)
    import transformers

    try:
        with _silent(), gpu_room():
            cached, kind = _of_cache(rank_id, manifest, folder)
            fresh = _of_disk(kind, folder, gate.check(open_checkpoint(folder)).method)
    except WcacheError as error:
        return _result(rank_id, "skipped", f"transformers can not run this model: {error.message}")
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        # Of transformers, or of torch for want of memory.
        line = (str(error).strip().splitlines() or [""])[0]
        if "illegal memory access" in line:
            # CUDA's word for a store into what is mapped for reading, and for the wrong place.
            return _result(rank_id, "bad", f"a model of transformers ends on them: {line[:200]}")
        why = f"{type(error).__name__}: {line[:200]}"
        return _result(rank_id, "skipped", f"transformers can not run this model: {why}")
    multiplied = ", with FP8 multiplied out," if kind.fp8_weights else ""
    tokens = f"logits of {len(PROMPT)} fixed tokens{multiplied}"
    beside = f"a fresh model of transformers {transformers.__version__}"
    if _bits_equal(cached, fresh):
        return _result(rank_id, "ok", f"{tokens} are those of {beside}, bit for bit")
    apart = float((cached.float() - fresh.float()).abs().max())
    largest = float(fresh.float().abs().max())
    detail = f"{tokens} are up to {apart:.3g} from those of {beside}, which go up to {largest:.3g}"
    return _result(rank_id, "warning" if cached.is_cuda else "bad", detail)


class _Kind:
    """What a fresh model has to be to be compared with the cached one."""

    def __init__(
        self, model: "transformers.PreTrainedModel", fp8_weights: Sequence[str] = ()
    ) -> None:
        self.type = type(model)
        self.fp8_weights = fp8_weights
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device


def _of_cache(rank_id: RankId, manifest: Manifest, folder: Path) -> "tuple[torch.Tensor, _Kind]":
    from wcache.client import attach
    from wcache.engines.transformers import model_of

    with attach(rank=rank_id.rank, instance=rank_id.instance) as attachment:
        if attachment.manifest.id != manifest.id:
            raise WcacheError("another generation is served since")
        model = model_of(attachment, folder, attn_implementation="eager")
        if model.main_input_name != "input_ids" or model.config.is_encoder_decoder:
            raise WcacheError(f"{type(model).__name__} does not go from tokens to logits")
        multiplied_out = multiply_out(model)
        kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if len(kinds) > 1:
            raise WcacheError("its weights are of several dtypes, which it would make one")
        return _run(model), _Kind(model, multiplied_out)


def _of_disk(kind: _Kind, folder: Path, method: str) -> "torch.Tensor":
    """``method`` is the checkpoint's own quantization."""
    options: dict[str, Any] = {
        "dtype": kind.dtype, "attn_implementation": "eager", "local_files_only": True,
        "trust_remote_code": False, "use_safetensors": True,
    }  # fmt: skip
    model: Any  # what transformers types only in part
    if method == "fp8":
        model = from_fp8_checkpoint(kind.type, folder, **options)
    else:
        model = kind.type.from_pretrained(folder, **options)
        round_as_fp8(model, kind.fp8_weights)
    model.eval()
    return _run(model.to(kind.device))


def _run(model: Any) -> "torch.Tensor":
    """Logits, or hidden states where there is no head, of the prompt."""
    import torch

    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.tensor([[token % vocabulary for token in PROMPT]], device=model.device)
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=False)
    found: torch.Tensor = output.logits if "logits" in output else output.last_hidden_state
    return found


def _bits_equal(first: "torch.Tensor", second: "torch.Tensor") -> bool:
    """Also where both are not a number, as with random weights."""
    import torch

    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def _why_not(manifest: Manifest, folder: Path | None) -> str:
    """Why no logits can be had; empty when they can be tried."""
    if shard := _shard(manifest.fingerprint):
        return f"the rank holds a shard ({shard}), and logits need the whole model"
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed (pip install 'wcache[transformers]')"
    if folder is None or not folder.is_dir():
        return "there is no checkpoint on disk to make a model of"
    needed = int(_multiplied_out_bytes(manifest) * _SPARE)
    free = available_bytes()
    if (uuid := manifest.slabs[0].device_uuid) is not None:
        # The fresh model comes into host memory first.
        free = min(free, devices.gpu(uuid).free_bytes)
    if needed > free:
        return f"a second copy of the model takes {size(needed)}, {size(free)} is free"
    return ""


def _multiplied_out_bytes(manifest: Manifest) -> int:
    """What the weights take when two bytes stand for each of FP8."""
    fp8 = sum(prod(t.shape) for t in manifest.tensors if t.dtype == WEIGHT_DTYPE)
    return manifest.weight_bytes + fp8


def _shard(fingerprint: Fingerprint) -> str:
    for name in ("tp_size", "pp_size", "ep_size"):
        count = getattr(fingerprint, name)
        if count is not None and count > 1:
            return f"{name} {count}"
    return ""


@contextmanager
def _silent() -> Iterator[None]:
    """transformers draws bars and warns of what it does with a model's settings."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _result(rank_id: RankId, outcome: Outcome, detail: str) -> Result:
    return Result(rank=rank_id.rank, check="logits", result=outcome, detail=detail)
