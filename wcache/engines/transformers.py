"""Hugging Face transformers models whose parameters are the cached weights, without a copy."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import transformers

from wcache.client import Attachment, attach
from wcache.client.bind import bind
from wcache.engines.transformers_fp8 import use_fp8_linears
from wcache.errors import CheckpointError, UsageError, WcacheError
from wcache.fingerprint import Fingerprint
from wcache.fp8 import weight_name
from wcache.manifest import Manifest
from wcache.memory.dtypes import TORCH_DTYPES

log = logging.getLogger(__name__)

T = TypeVar("T")

_NAMES_TOLD = 3
# What old checkpoints have and models compute themselves now; transformers passes over both.
_COMPUTED_NOW = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
# No buffer that a model has computed consists of this byte alone.
_UNTOUCHED = 0xA5


def from_cache(
    model: str | Path | None = None,
    *,
    rank: int | None = None,
    instance: str | None = None,
    wanted: Fingerprint | None = None,
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    wait_s: float = 0.0,
    **config_overrides: Any,
) -> "transformers.PreTrainedModel":
    """A model in eval mode that computes with the weights of a rank, mapped and not copied.

    ``model``, a folder or a hub id, is where the configuration is read; left out, it is the
    checkpoint that the weights were loaded from. ``rank``, ``instance``, ``wanted`` and ``wait_s``
    are those of :func:`wcache.attach`. ``device`` says where the weights are expected to lie.
    ``config_overrides`` replace values of the configuration, as in ``from_pretrained``. The dtype
    is that of the cached weights, and code of the checkpoint's is never run. Where they are FP8 the
    model has transformers' FP8 linear layers, which compute on a GPU and nowhere else.

    The attachment is ``model.wcache_attachment``; closing it ends the lease. The parameters must
    not be written to. Raises what :func:`wcache.attach` raises, :class:`CheckpointError` for a
    configuration that is not there or not known to transformers, and :class:`WcacheError` when the
    cached tensors are not those of the model.
    """
    attachment = attach(rank=rank, instance=instance, wanted=wanted, wait_s=wait_s)
    try:
        return model_of(
            attachment,
            model,
            device=device,
            attn_implementation=attn_implementation,
            **config_overrides,
        )
    except BaseException:
        attachment.close()
        raise


def model_of(
    attachment: Attachment,
    model: str | Path | None = None,
    *,
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    **config_overrides: Any,
) -> "transformers.PreTrainedModel":
    """:func:`from_cache` for weights that are attached already; the model keeps ``attachment``."""
    _check_whole(attachment.fingerprint)
    _check_device(attachment.device, device)
    source = _Source.of(model, attachment.fingerprint)
    config = source.config(config_overrides)
    built = _build(config, attachment, attn_implementation)
    use_fp8_linears(built, attachment.manifest, attachment.device)
    manifest, tensors = _named_as_in(built, attachment)
    _compute_buffers(built, manifest, attachment.device)
    bind(built, manifest, tensors)
    _tie_equal(built)
    copied = [name for name, p in built.named_parameters() if not attachment.holds(p)]
    if copied:
        raise WcacheError(f"parameters were copied out of the map: {_first(copied)}")
    if built.can_generate() and (generation := source.generation_config()) is not None:
        built.generation_config = generation
    loose: Any = built  # what transformers types only in part
    loose.wcache_attachment = attachment
    loose.eval()
    return built


class _Source:
    """Where a model's configuration is read: a folder, or a revision of a hub repository."""

    def __init__(self, name: str, revision: str | None) -> None:
        self._name = name
        self._is_folder = Path(name).is_dir()
        self._revision = None if self._is_folder else revision

    @classmethod
    def of(cls, model: str | Path | None, fingerprint: Fingerprint) -> "_Source":
        if model is not None and str(model) != fingerprint.model:
            return cls(str(model), None)
        name, revision = fingerprint.model, fingerprint.revision
        # What an engine published may be called anything: only a revision makes it a repository.
        if name is None or not (Path(name).is_dir() or revision):
            raise CheckpointError(
                f"configuration of the cached model is not there: {name or 'it has no name'}",
                hint="name its checkpoint: from_cache(model=…)",
            )
        return cls(name, revision)

    def config(self, overrides: dict[str, Any]) -> "transformers.PreTrainedConfig":
        """Raises :class:`CheckpointError`, and :class:`UsageError` for an unknown override."""
        for name in ("dtype", "torch_dtype", "trust_remote_code", "quantization_config"):
            if name in overrides:
                raise UsageError(f"{name} can not be chosen for weights that are cached")
        config: Any
        try:
            config, unused = self._read(
                transformers.AutoConfig.from_pretrained,
                trust_remote_code=False,
                return_unused_kwargs=True,
                **overrides,
            )
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"no configuration of {self._name} for transformers: {_line(error)}",
                hint="name the model's checkpoint: from_cache(model=…)",
            ) from None
        if unused:
            raise UsageError(f"{config.model_type} has no setting {', '.join(sorted(unused))}")
        checked: transformers.PreTrainedConfig = config
        return checked

    def generation_config(self) -> "transformers.GenerationConfig | None":
        """None where the checkpoint has none: the model then has its defaults."""
        try:
            return self._read(transformers.GenerationConfig.from_pretrained)
        except OSError:
            return None

    def _read(self, read: Callable[..., T], **options: Any) -> T:
        """What is in the local cache of the hub needs no network, which an engine may not have."""
        if self._revision is not None:
            options["revision"] = self._revision
        if self._is_folder:
            return read(self._name, **options)
        try:
            return read(self._name, local_files_only=True, **options)
        except OSError:
            return read(self._name, **options)


def _check_whole(fingerprint: Fingerprint) -> None:
    for name in ("tp_size", "pp_size", "ep_size"):
        size = getattr(fingerprint, name)
        if size is not None and size > 1:
            raise WcacheError(
                f"rank holds a shard of a model ({name} {size}), and transformers needs all of it",
                hint="load the model with --tp 1 into an instance of its own",
            )


def _check_device(held: torch.device, wanted: str | torch.device | None) -> None:
    if wanted is None:
        return
    asked = torch.device(wanted)
    if asked.type != held.type or asked.index not in (None, held.index):
        raise UsageError(f"weights are cached on {held}, {asked} was asked for")


def _build(
    config: "transformers.PreTrainedConfig",
    attachment: Attachment,
    attn_implementation: str | None,
) -> "transformers.PreTrainedModel":
    """The model without content: every parameter and buffer on the meta device."""
    names = getattr(config, "architectures", None) or ()
    architecture = attachment.fingerprint.architecture or next(iter(names), None)
    kind = getattr(transformers, architecture, None) if architecture else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CheckpointError(
            f"transformers {transformers.__version__} has no model {architecture!r}",
            hint="models that bring code of their own are not supported",
        )
    options: dict[str, Any] = {"dtype": _main_dtype(attachment.manifest)}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    # What the Auto classes' from_config calls for the class that they chose.
    build: Callable[..., transformers.PreTrainedModel] = kind._from_config
    with torch.device("meta"):
        return build(config, **options)


def _main_dtype(manifest: Manifest) -> torch.dtype:
    """The floating dtype of most bytes, as what the model computes with between its weights."""
    nbytes: Counter[torch.dtype] = Counter()
    for tensor in manifest.tensors:
        dtype = TORCH_DTYPES[tensor.dtype]
        is_scale = weight_name(tensor.name) is not None
        if dtype.is_floating_point and dtype.itemsize > 1 and not (is_scale or tensor.tied_to):
            nbytes[dtype] += prod(tensor.shape) * dtype.itemsize
    return nbytes.most_common(1)[0][0] if nbytes else torch.get_default_dtype()


# --- names ------------------------------------------------------------------------------------


def _named_as_in(
    model: "transformers.PreTrainedModel", attachment: Attachment
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """The manifest and its tensors by the names that ``model`` knows them by.

    A checkpoint of a bare model has no prefix that a model with a head has, and the other way
    round; tensors that transformers passes over are left out.
    """
    manifest = attachment.manifest
    known = _registered_names(model)
    prefix = model.base_model_prefix + "."
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), *_COMPUTED_NOW]
    is_ignored = re.compile("|".join(f"(?:{pattern})" for pattern in ignored)).search
    names: dict[str, str] = {}
    unknown: list[str] = []
    for tensor in manifest.tensors:
        old = tensor.name
        choices = (old, prefix + old, old.removeprefix(prefix))
        new = next((name for name in choices if name in known), None)
        if tensor.kind == "attribute":
            names[old] = old
        elif new is not None:
            names[old] = new
            known.remove(new)  # so that no second tensor takes it
        elif not is_ignored(old):
            unknown.append(old)
    if unknown:
        raise _other_names(model, unknown, names)
    tensors = {new: attachment.tensors[old] for old, new in names.items()}
    return _renamed(manifest, names), tensors


def _registered_names(model: torch.nn.Module) -> set[str]:
    return {
        name
        for found in (
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
        for name, _ in found
    }


def _renamed(manifest: Manifest, names: dict[str, str]) -> Manifest:
    """``manifest`` with the tensors that ``names`` has, by their new names."""
    roots: dict[str, str] = {}
    tensors = []
    for tensor in manifest.tensors:
        if tensor.name not in names:
            continue
        new = names[tensor.name]
        # The first of those that are tied may have been left out, so the first that is kept counts.
        root = roots.setdefault(tensor.tied_to or tensor.name, new)
        tied_to = None if root == new else root
        tensors.append(msgspec.structs.replace(tensor, name=new, tied_to=tied_to))
    return msgspec.structs.replace(manifest, tensors=tuple(tensors))


def _other_names(model: torch.nn.Module, unknown: list[str], names: dict[str, str]) -> WcacheError:
    missing = sorted({name for name, _ in model.named_parameters()} - set(names.values()))
    message = f"{type(model).__name__} has no {_first(unknown)}, which the cache has"
    if not missing:
        return WcacheError(message, hint="the checkpoint is of another architecture")
    return WcacheError(
        f"{message}; the cache has no {_first(missing)}",
        hint="transformers renames or merges this checkpoint's tensors as it loads them, which"
        " wcache does not: publish the loaded model with wcache.publish",
    )


def _first(names: list[str]) -> str:
    more = len(names) - _NAMES_TOLD
    return ", ".join(names[:_NAMES_TOLD]) + (f" and {more} more" if more > 0 else "")


def _line(error: Exception) -> str:
    """The first line of an error's text; the message of a KeyError would be its repr."""
    text = str(error.args[0]) if error.args else type(error).__name__
    return text.strip().partition("\n")[0].rstrip(".")


# --- what no checkpoint has -------------------------------------------------------------------


def _compute_buffers(
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
            f"{type(model).__name__} does not compute its buffers {_first(left)}",
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


def _tie_equal(model: "transformers.PreTrainedModel") -> None:
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
