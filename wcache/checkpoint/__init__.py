"""Checkpoints on disk: reading and checking what they declare, without torch."""

from wcache.checkpoint.folder import Checkpoint, CheckpointConfig, open_checkpoint
from wcache.checkpoint.header import CheckpointFile, TensorEntry
from wcache.checkpoint.identities import IdentityCache
from wcache.checkpoint.identity import Identity, diff, identify

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointFile",
    "Identity",
    "IdentityCache",
    "TensorEntry",
    "diff",
    "identify",
    "open_checkpoint",
]
