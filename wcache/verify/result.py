"""What verifying a rank found, as it is shown and as it is written as JSON."""

from collections.abc import Callable
from typing import Literal

import msgspec

from wcache.errors import ExitCode

CheckName = Literal[
    "weights", "manifest", "descriptors", "configuration", "checkpoint", "digests",
    "parity", "logits", "repair",
]  # fmt: skip
Outcome = Literal["ok", "warning", "bad", "skipped"]
"""``skipped``: the check could not be made; ``detail`` says why."""
Depth = Literal["quick", "digest", "parity", "repair"]

Progress = Callable[[str, int, int], None]
"""Called with one word for what is done, the bytes that are done, and all bytes."""

MAX_NAMES = 5
"""So many names are told, and how many more there are."""


class TensorDifference(msgspec.Struct, frozen=True, kw_only=True):
    """In what one cached tensor is not that of a fresh load."""

    tensor: str
    field: str
    cached: str
    fresh: str

    def __str__(self) -> str:
        return f"{self.tensor} {self.field}: cached {self.cached}, fresh {self.fresh}"


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one check of one rank found."""

    rank: int
    check: CheckName
    result: Outcome
    detail: str
    differences: tuple[TensorDifference, ...] = ()
    """Of ``parity``: all that were found."""


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of ``verify --json``."""

    version: int = 1
    instance: str
    depth: Depth
    results: tuple[Result, ...]

    @property
    def exit_code(self) -> ExitCode:
        """A check that could not be made is no success; logits can not always be had."""
        if any(result.result == "bad" for result in self.results):
            return ExitCode.MISMATCH
        skipped = {result.check for result in self.results if result.result == "skipped"}
        if "weights" in skipped:
            return ExitCode.NOT_READY
        return ExitCode.FAILED if skipped - {"logits"} else ExitCode.DONE


def some(names: list[str] | tuple[str, ...]) -> str:
    """``names``, or the first of them and how many more there are."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more if names else "no tensor"
