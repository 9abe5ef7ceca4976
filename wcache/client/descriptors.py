"""The descriptors that a client keeps of what it has mapped, to give them back to its daemon."""

import logging
import resource
from collections.abc import Sequence

from wcache.manifest import SlabInfo
from wcache.protocol.wire import close_all

log = logging.getLogger(__name__)

# Engines have files and sockets of their own to open, and many have not raised the soft limit.
_SHARE = 4


class MappedDescriptors:
    """The manifest's descriptor and the slabs'; close-on-exec, as they came.

    They keep the memory alive like the map does. A mapping can not be turned back into descriptors,
    so these are all by which a daemon that has lost the generation can have it again.
    """

    def __init__(self, fds: Sequence[int], slabs: tuple[SlabInfo, ...]) -> None:
        """Takes ownership of ``fds``."""
        self._fds = list(fds)
        self.slabs = slabs
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and len(self._fds) > soft // _SHARE:
            log.warning(
                "%d descriptors are not kept, %d open files are allowed: these weights can not be"
                " given back to a daemon that loses them (ulimit -n)",
                len(self._fds),
                soft,
            )
            self.close()

    @property
    def fds(self) -> list[int]:
        """Empty once they were closed."""
        return list(self._fds)

    def close(self) -> None:
        """Closes this process's copies; safe to call twice."""
        # Forgotten first: a child that is forked in between must not close what it does not have.
        fds, self._fds = self._fds, []
        close_all(fds)
