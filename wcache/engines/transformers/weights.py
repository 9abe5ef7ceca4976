"""What a model is bound to: the tensors of an attachment, or those that this process has read."""

from collections.abc import Mapping
from typing import Protocol

import torch

from wcache.manifest import Manifest


class Weights(Protocol):
    """:class:`wcache.client.Attachment` is one."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """By the names of the manifest; tied names have one object."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """True when ``tensor`` lies in the memory of these weights."""
