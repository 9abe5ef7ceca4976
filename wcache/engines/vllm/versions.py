"""Which versions of vLLM the plugin knows, and what differs between them."""

import re

from wcache.errors import WcacheError

FIRST = (0, 30)
"""0.30 brought ``weights_already_processed``, without which finished weights can not be bound."""
LAST_SEEN = (0, 33)
"""The newest that was tried; of a later one the engine's log tells."""
KNOWS_EXTERNAL_WEIGHTS = (0, 32)
"""From here on a loader tells how many bytes lie on the GPU outside of the process."""


def parse(version: str) -> tuple[int, int]:
    """``0.32.1+cpu`` is (0, 32); raises :class:`WcacheError` for what is no version."""
    found = re.match(r"v?(\d{1,6})\.(\d{1,6})", version)
    if found is None:
        raise WcacheError(
            f"vllm has the version {version!r}, which wcache can not read",
            hint=f"wcache is for vllm {_text(FIRST)} and later",
        )
    return int(found[1]), int(found[2])


def check(version: str) -> tuple[int, int]:
    """The parsed version; raises :class:`WcacheError` for one that the plugin can not serve."""
    parsed = parse(version)
    if parsed < FIRST:
        raise WcacheError(
            f"vllm {version} is too old for wcache, which needs {_text(FIRST)} or later",
            hint="upgrade vllm, or start it without wcache (wcache run --mode off)",
        )
    return parsed


def untried(version: str) -> str:
    """What to say of a version later than all that were tried; empty for any other."""
    if parse(version) <= LAST_SEEN:
        return ""
    return f"vllm {version} is later than {_text(LAST_SEEN)}, the last that wcache was tried with"


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
