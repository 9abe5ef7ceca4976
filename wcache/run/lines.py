"""Passes a child's output on unchanged, and shows each line of it to a reader."""

import os
import select
from collections.abc import Callable

CHUNK_BYTES = 64 << 10
MAX_LINE_BYTES = 64 << 10


class Passage:
    """From the read end of a pipe to a descriptor of this process."""

    def __init__(self, source: int, destination: int, seen: Callable[[str], None]) -> None:
        """Owns ``source``."""
        self.source = source
        self._destination = destination
        self._seen = seen
        self._rest = b""

    def pass_on(self) -> bool:
        """Moves what is there; False at the end, when ``source`` is closed."""
        data = os.read(self.source, CHUNK_BYTES)
        if not data:
            self.close()
            return False
        self._write(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        # What never ends a line (a progress bar) is no line that is looked for.
        self._rest = self._rest[-MAX_LINE_BYTES:]
        for line in lines:
            self._seen(line[:MAX_LINE_BYTES].decode(errors="replace"))
        return True

    def close(self) -> None:
        if self.source >= 0:
            os.close(self.source)
            self.source = -1

    def _write(self, data: bytes) -> None:
        """Waits for a reader that is slow; what can not be written is lost.

        Whoever read it may have left, the disk of the log may be full (and have room again later):
        the engine serves others, and goes on.
        """
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._destination, view) :]
            except BlockingIOError:
                # Whoever else has this terminal or pipe has made it non-blocking, for all of us.
                _wait_for_room(self._destination)
            except OSError:
                return


def _wait_for_room(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll()
