"""The engine's side: attach to a rank, map its weights, bind a module to them, hold the lease.

torch is imported when weights are mapped, not before.
"""

from wcache.client.attachment import Attachment
from wcache.client.connect import attach

__all__ = ["Attachment", "attach"]
