"""What a model has and no checkpoint: computed buffers, and the ties between its parameters."""

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from wcache.engines.transformers.names import first
from wcache.errors import WcacheError
from wcache.manifest import Manifest

if TYPE_CHECKING:
    import transformers

log = logging.getLogger(__name__)

# No buffer that a model has computed consists of this byte alone.
_UNTOUCHED = 0xA5


def compute_buffers(
    model: "transformers.PreTrainedModel", manifest: Manifest, device: torch.device
) -> None:
    """Computes the non-persistent buffers that are not cached, such as rotary frequencies.

    transformers computes them in ``_init_weights`` of the modules that own them. That runs here
    before anything is bound: parameters are still on the meta device, where an initialization
    that writes to them changes nothing, while in the map it would end the process.

    Raises :class:`WcacheError` for a buffer that the model does not compute.
    """
    cached = {tensor.name for tensor in manifest.tensors}
    fresh: dict[int, torch.Tensor] = {}
    made: list[tuple[str, torch.nn.Module, str, torch.Tensor]] = []
    for module in model.modules():
        module._is_hf_initialized = True  # type: ignore[assignment]  # transformers' own mark
    for name, owner, leaf, buffer in list(_computed(model)):
        if name in cached:
            continue
        if not buffer.is_meta:
            owner._buffers[leaf] = buffer.to(device)
            continue
        if id(buffer) not in fresh:
            fresh[id(buffer)] = torch.empty_like(buffer, device=device)
            _bytes(fresh[id(buffer)]).fill_(_UNTOUCHED)
        owner._buffers[leaf] = fresh[id(buffer)]
        owner._is_hf_initialized = False  # type: ignore[assignment]  # see above
        made.append((name, owner, leaf, buffer))
    if not made:
        return
    initialize: Callable[[], None] = model.initialize_weights
    initialize()
    left = [name for name, owner, leaf, _ in made if _is_untouched(owner._buffers[leaf])]
    if left:
        raise WcacheError(
            f"{type(model).__name__} does not compute its buffers {first(left)}",
            hint="publish the loaded model with wcache.publish, which carries buffers too",
        )


def _computed(
    model: "transformers.PreTrainedModel",
) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    """Name, owner, attribute and value of every buffer that a state dict leaves out."""
    for path, owner in model.named_modules(remove_duplicate=False):
        for leaf, buffer in owner._buffers.items():
            if buffer is not None and leaf in owner._non_persistent_buffers_set:
                yield f"{path}.{leaf}" if path else leaf, owner, leaf, buffer


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 over the whole storage of ``tensor``."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _is_untouched(buffer: torch.Tensor | None) -> bool:
    if buffer is None or buffer.is_meta or not buffer.numel():
        return False
    return bool((_bytes(buffer) == _UNTOUCHED).all())


def tie_equal(model: "transformers.PreTrainedModel") -> None:
    """Ties what the configuration ties, and what the checkpoint had twice with equal values.

    As ``tie_weights`` does it after loading, which is not called: it pads biases, even by nothing,
    into copies outside the map.
    """
    for target, source in list(model.all_tied_weights_keys.items()):
        one, other = model.get_parameter(target), model.get_parameter(source)
        if one is other:
            continue
        if one.shape == other.shape and torch.equal(one, other):
            path, _, leaf = target.rpartition(".")
            model.get_submodule(path).register_parameter(leaf, other)
        else:
            log.warning(
                "%s and %s are tied by the configuration and cached with different values:"
                " they are left apart",
                target,
                source,
            )
            model.all_tied_weights_keys.pop(target)
