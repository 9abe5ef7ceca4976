"""From mapped weights to a model that vLLM runs: built on meta, bound, post-processed."""

import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.utils import weights_already_processed
from vllm.utils.torch_utils import set_default_torch_dtype

from wcache.client import Attachment
from wcache.client.slots import Tree
from wcache.engines.vllm.disk import spare_cpu_weights
from wcache.engines.vllm.python_state import restore
from wcache.errors import UnsupportedQuantForIPCError, WcacheError
from wcache.memory.dtypes import TORCH_DTYPES

Told = Callable[[str, float], None]
_NAMES_TOLD = 5


def build(
    attachment: Attachment,
    vllm_config: Any,
    model_config: Any,
    prefix: str,
    device: torch.device,
    told: Told,
) -> torch.nn.Module:
    """The model in eval mode, its parameters views of the map; ``told`` gets (step, seconds).

    Raises :class:`WcacheError` that names what does not fit or would have no content, and
    :class:`UnsupportedQuantForIPCError` for a layer whose finished weights vLLM can not take.
    """
    clock = _Clock(told)
    with set_default_torch_dtype(model_config.dtype):
        with torch.device("meta"):
            model: torch.nn.Module = initialize_model(
                vllm_config=vllm_config, model_config=model_config, prefix=prefix
            )
        if device.type == "cpu":
            spare_cpu_weights(model)
        _check_methods(model)
        clock.end("build")
        _make_room(model, attachment)
        # Extras come last: a flag among them could tell the post-processing that it was done.
        plain = msgspec.structs.replace(attachment.manifest, extras={})
        from wcache.client.bind import bind

        bind(model, plain, attachment.tensors, allow_missing=lambda _: True)
        clock.end("bind")
        with weights_already_processed():
            process_weights_after_loading(model, model_config, device)
        _offer_warm_up(model)
        restore(model, attachment.manifest.extras)
        clock.end("process")
    _check_is_whole(model)
    return model.eval()


class _Clock:
    def __init__(self, told: Told) -> None:
        self._told = told
        self._begun = time.perf_counter()

    def end(self, step: str) -> None:
        now = time.perf_counter()
        self._told(step, now - self._begun)
        self._begun = now


def _check_methods(model: torch.nn.Module) -> None:
    """Before anything is bound: vLLM itself looks only while it post-processes."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or not hasattr(method, "process_weights_after_loading"):
            continue
        if not getattr(method, "supports_pre_processed_weights", False):
            kind = type(method).__name__
            raise UnsupportedQuantForIPCError(
                f"layer {name or 'of the model'}: vllm's {kind} takes no finished weights",
                method=kind,
                hint="start the engine without wcache (wcache run --mode off)",
            )


def _make_room(model: torch.nn.Module, attachment: Attachment) -> None:
    """Registers the parameters that post-processing had added, so that they can be bound."""
    tree = Tree(model)
    for tensor in attachment.manifest.tensors:
        slot = tree.slot(tensor.name)
        if tensor.kind != "parameter" or slot is None or slot.kind is not None:
            continue
        if slot.value is not None or getattr(slot.owner, slot.leaf, None) is not None:
            continue  # something else has the name: bind refuses it
        content = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype], device="meta")
        slot.owner.register_parameter(slot.leaf, torch.nn.Parameter(content, requires_grad=False))


def _offer_warm_up(model: torch.nn.Module) -> None:
    """Sets what post-processing sets beside the weights, and skips for those that are finished.

    vLLM compiles DeepGEMM's kernels ahead for the layers that name their kernel so; without it the
    first requests would wait for the compiler.
    """
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "fp8_linear", None)
        if hasattr(kernel, "get_deep_gemm_warmup_weights") and not getattr(module, "is_bmm", False):
            loose: Any = module
            loose.deep_gemm_warmup_provider = kernel


def _check_is_whole(model: torch.nn.Module) -> None:
    left = [
        name
        for name, slot in Tree(model).tensors()
        if slot.value is not None and slot.value.is_meta
    ]
    if left:
        more = f" and {len(left) - _NAMES_TOLD} more" if len(left) > _NAMES_TOLD else ""
        raise WcacheError(
            f"tensors of the model without content: {', '.join(left[:_NAMES_TOLD])}{more}",
            hint="publish the weights again with this version of vllm (wcache down, wcache up)",
        )
