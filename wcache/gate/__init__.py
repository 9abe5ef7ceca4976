"""The gate: only weights whose quantization is carried whole by a map are kept. Pure, no torch.

A map carries the bytes of tensors, their shapes and strides. Most quantized weights are rearranged
by the engine after loading, or mean something only together with Python objects, so a method is
refused unless it is known to need neither (:mod:`wcache.gate.methods`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wcache.errors import CheckpointError, UnsupportedQuantForIPCError
from wcache.gate import headers
from wcache.gate.methods import BY_KEY
from wcache.gate.settings import Found, declared, methods_of

if TYPE_CHECKING:
    from wcache.checkpoint import Checkpoint

CONFIG = "config.json"
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of a checkpoint are quantized, after the gate has let them pass."""

    method: str
    """``none`` or ``fp8``."""
    settings: Mapping[str, Any] | None = field(default=None, repr=False)
    """What config.json says of it."""


def check(checkpoint: "Checkpoint") -> Quantization:
    """Looks at config.json, the files beside it and every tensor that the headers declare.

    Raises :class:`UnsupportedQuantForIPCError` for a method that can not be kept, also where only a
    group of tensors has it, and :class:`CheckpointError` when settings and headers contradict each
    other or an FP8 weight and its scale do not fit together. No weights are read.
    """
    path = checkpoint.path
    told = list(declared(checkpoint.config.raw, CONFIG))
    for name, document in checkpoint.quantization_files.items():
        told += methods_of(document, name)
    refuse((*told, *headers.found_in(checkpoint.tensors)), str(path))
    has_blocks = headers.check_blocks(checkpoint.tensors, path)
    if has_blocks and not told:
        raise CheckpointError(f"{path}: {CONFIG} does not say that weights are FP8, but they are")
    if told and not has_blocks:
        raise CheckpointError(
            f"{path}: {told[0].where} says that weights are FP8, but none is",
            hint=f"where the weights were dequantized, take it out of {CONFIG}",
        )
    return Quantization("fp8", told[0].settings) if told else Quantization("none")


def check_settings(settings: Mapping[str, Any], where: str) -> str:
    """The method that one table of settings names, an engine's module for one.

    Raises :class:`UnsupportedQuantForIPCError` when it can not be kept.
    """
    told = tuple(methods_of(settings, where))
    refuse(told, "")
    return told[0].key if told else "none"


def refuse(found: Iterable[Found], source: str) -> None:
    """Raises :class:`UnsupportedQuantForIPCError` when any of ``found`` can not be kept."""
    if refused := [one for one in found if not BY_KEY[one.key].kept]:
        raise refusal(refused, source)


def refusal(refused: Sequence[Found], source: str) -> UnsupportedQuantForIPCError:
    """One line for all of ``refused``: the first by name, how many like it, and the others."""
    first = refused[0]
    method = BY_KEY[first.key]
    where = first.where if first.where.isprintable() else repr(first.where)
    title = f"{first.name!r}" if first.key == "unknown" and first.name else method.title
    begin = f"{source}: " if source else ""
    more = len(refused) - 1
    others = sorted({BY_KEY[one.key].title for one in refused} - {method.title})
    also = f" (and {more} more{': also ' if others else ''}{', '.join(others)})" if more else ""
    return UnsupportedQuantForIPCError(
        f"{begin}{where[:_SHOWN_CHARACTERS]}{also}: weights quantized with {title} can not be kept:"
        f" {method.reason}",
        method=first.key,
        hint=method.way_out,
    )


__all__ = [
    "Quantization",
    "check",
    "check_settings",
    "refuse",
    "refusal",
]
