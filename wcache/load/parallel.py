"""How a model is spread over ranks, read from transformers as data: no model is built."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wcache.checkpoint import Checkpoint
from wcache.errors import CheckpointError

HINT_PUBLISH = 'use tp 1 and pp 1, or let an engine shard it and publish (loader = "publish")'


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """The tensor- and pipeline-parallel plans of one architecture, as transformers states them."""

    architecture: str
    prefix: str = ""
    """Name of the base model in the whole model, ``model`` as a rule."""
    base: Mapping[str, str] = field(default_factory=dict)
    """Style by module of the base model, layer numbers as ``*``."""
    head: Mapping[str, str] = field(default_factory=dict)
    """Style by module beside the base model, the output head as a rule."""
    stages: tuple[str, ...] = ()
    """Modules of the base model in the order in which they run."""
    head_stages: tuple[str, ...] = ()
    """Modules beside the base model, which run last."""
    attention_heads: tuple[int, ...] = ()
    """Of all layers, or one for each; empty when the config does not say."""
    kv_heads: tuple[int, ...] = ()

    def prefix_in(self, names: Iterable[str]) -> str:
        """What stands before the base model's names: nothing where a checkpoint has it alone."""
        prefix = f"{self.prefix}." if self.prefix else ""
        return prefix if any(name.startswith(prefix) for name in names) else ""


def read_parallel_plan(checkpoint: Checkpoint) -> ParallelPlan:
    """The plans for the checkpoint's architecture; raises what :func:`known_model` raises."""
    return plan_of(*known_model(checkpoint.path, checkpoint.config.architecture, HINT_PUBLISH))


def plan_of(config: Any, model: Any) -> ParallelPlan:
    """The plans of ``model``, a class of transformers, with ``config``."""
    return ParallelPlan(
        architecture=model.__name__,
        prefix=str(getattr(model, "base_model_prefix", "") or ""),
        base=_styles(config, "base_model_tp_plan"),
        head=_styles(model, "_tp_plan"),
        stages=tuple(getattr(config, "base_model_pp_plan", None) or ()),
        head_stages=tuple(getattr(model, "_pp_plan", None) or ()),
        attention_heads=_counts(config, "num_attention_heads"),
        kv_heads=_counts(config, "num_key_value_heads") or _counts(config, "num_attention_heads"),
    )


def known_model(path: Path, architecture: str | None, hint: str) -> tuple[Any, Any]:
    """The configuration in ``path`` and the class of its model, both as transformers has them.

    Raises :class:`CheckpointError`, with ``hint``, when transformers is not installed or does not
    know the model. Code that a checkpoint brings along is never run.
    """
    if architecture is None:
        raise CheckpointError(
            f"{path}: config.json names no architecture, so transformers can not be asked about it",
            hint=hint,
        )
    try:
        import transformers
        from huggingface_hub.errors import StrictDataclassError
    except ImportError:
        raise CheckpointError(
            "transformers, which knows how models are built and sharded, is not installed",
            hint="pip install 'wcache[transformers]'",
        ) from None
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"transformers {transformers.__version__} can not read the config of {architecture}:"
            f" {reason[:200]}",
            hint=hint,
        ) from None
    model = getattr(transformers, architecture, None)
    if not isinstance(model, type):
        raise CheckpointError(
            f"transformers {transformers.__version__} does not know {architecture}", hint=hint
        )
    return config, model


def _styles(owner: Any, name: str) -> dict[str, str]:
    return {str(key): str(style) for key, style in (getattr(owner, name, None) or {}).items()}


def _counts(config: Any, name: str) -> tuple[int, ...]:
    """A number for all layers or a list with one for each, as some configs have it."""
    value = getattr(config, name, None)
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list | tuple) and all(isinstance(item, int) for item in value):
        return tuple(value)
    return ()
