"""What to say where torch finds no room on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from wcache.errors import OutOfMemoryError


@contextmanager
def gpu_room(hint: str) -> Iterator[None]:
    """Raises :class:`OutOfMemoryError`, with ``hint``, in place of torch's own error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(".")[0].lower()
        raise OutOfMemoryError(f"the GPU is too full: {reason}", hint=hint) from None
