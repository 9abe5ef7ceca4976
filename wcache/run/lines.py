"""Passes a child's output on unchanged, and shows each line of it to a reader."""

import os
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
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._destination, view) :]
        except BrokenPipeError:
            # Whoever read our output has left; the engine serves others and goes on.
            self._destination = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
