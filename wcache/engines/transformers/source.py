"""Where a cached model's configuration is read: a folder, or a revision of a hub repository."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import transformers

from wcache.errors import CheckpointError, UsageError
from wcache.fingerprint import Fingerprint

T = TypeVar("T")


class Source:
    """Where a model's configuration is read: a folder, or a revision of a hub repository."""

    def __init__(self, name: str, revision: str | None) -> None:
        self._name = name
        self._is_folder = Path(name).is_dir()
        self._revision = None if self._is_folder else revision

    @classmethod
    def of(cls, config: str | Path | None, fingerprint: Fingerprint) -> "Source":
        """``config`` where it is given, else the checkpoint that the weights were loaded from."""
        if config is not None and str(config) != fingerprint.model:
            return cls(str(config), None)
        name, revision = fingerprint.model, fingerprint.revision
        # What an engine published may be called anything: only a revision makes it a repository.
        if name is None or not (Path(name).is_dir() or revision):
            raise CheckpointError(
                f"configuration of the cached model is not there: {name or 'it has no name'}",
                hint="name its checkpoint: from_cache(config=…)",
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
                hint="name the model's checkpoint: from_cache(config=…)",
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


def _line(error: Exception) -> str:
    """The first line of an error's text; the message of a KeyError would be its repr."""
    text = str(error.args[0]) if error.args else type(error).__name__
    return text.strip().partition("\n")[0].rstrip(".")
