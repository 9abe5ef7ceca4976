"""wcache keeps a model's finished weights in memory while inference engines come and go.

The names below are imported on first use: the daemon is a part of this package and must start
without torch.
"""

# Not typing's: that would be imported before Ctrl-C can end a command without a traceback.
TYPE_CHECKING = False

__version__ = "0.1.0"

__all__ = ["Access", "attach", "first_token", "publish"]

if TYPE_CHECKING:
    from typing import Any

    from wcache.client import attach
    from wcache.engines.orders import first_token
    from wcache.load.module import publish
    from wcache.memory.slab import Access


def __getattr__(name: str) -> "Any":
    if name == "attach":
        from wcache.client import attach

        return attach
    if name == "first_token":
        from wcache.engines.orders import first_token

        return first_token
    if name == "publish":
        from wcache.load.module import publish

        return publish
    if name == "Access":
        from wcache.memory.slab import Access

        return Access
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
