"""Hugging Face transformers: models over the cache in scripts, and how ``wcache run`` starts those.

The names are imported on first use: how a script is started is asked without torch.
"""

from typing import TYPE_CHECKING, Any

__all__ = ["from_cache", "model_of"]

if TYPE_CHECKING:
    from wcache.engines.transformers.cache import from_cache
    from wcache.engines.transformers.model import model_of


def __getattr__(name: str) -> Any:
    if name == "from_cache":
        from wcache.engines.transformers.cache import from_cache

        return from_cache
    if name == "model_of":
        from wcache.engines.transformers.model import model_of

        return model_of
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
