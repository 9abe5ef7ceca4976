"""One peer of the control socket: its bytes in, its answers out, never blocking."""

import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from wcache.errors import ProtocolError
from wcache.protocol.messages import (
    MAX_FDS_PER_FRAME,
    MAX_FDS_PER_TRANSFER,
    Descriptors,
    FrameReader,
    Hello,
    encode_frame,
)
from wcache.protocol.wire import Credentials, close_all, peer_credentials, receive, send

# A peer that does not read its answers is cut off here: 4,096 descriptor frames fit many times.
MAX_QUEUED_BYTES = 8 << 20
# For the greeting, and from the first byte of a message to its last.
PATIENCE_S = 10.0


class Connection:
    """Owns the socket and every descriptor that came and was not taken yet."""

    def __init__(self, number: int, accepted: socket.socket) -> None:
        self.number = number
        self.peer: Credentials = peer_credentials(accepted)
        self.hello: Hello | None = None
        self._socket = accepted
        self._socket.setblocking(False)
        self._reader = FrameReader()
        self._fds: list[int] = []
        self._announced = 0
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._out_bytes = 0
        self._waiting_since: float | None = time.monotonic()
        self.closing = False
        """Set when the connection is to end once everything queued has gone out."""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def wants_to_write(self) -> bool:
        return bool(self._out)

    def is_overdue(self, now: float) -> bool:
        """True for a peer that began something and did not finish it in time."""
        return self._waiting_since is not None and now - self._waiting_since > PATIENCE_S

    def read(self) -> Iterator[bytes]:
        """Yields the messages that have come.

        Raises ``ConnectionError`` at the end of the stream and :class:`ProtocolError` for a peer
        that does not keep to the protocol.
        """
        try:
            data, fds = receive(self._socket)
        except BlockingIOError:
            return
        self._fds += fds
        if len(self._fds) > MAX_FDS_PER_TRANSFER:
            raise ProtocolError("too many descriptors")
        if not data:
            raise ConnectionResetError("the peer closed the connection")
        yield from self._reader.feed(data)
        if self._reader.is_empty and not self._fds and self.hello is not None:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = time.monotonic()

    def announce(self, count: int) -> None:
        """Notes that ``count`` of the descriptors belong to the message that follows.

        The kernel may give the end of one message and a frame with descriptors in one read, so
        what has come by now is no sign of what belongs to which message: only the count is.
        """
        if not 0 < count <= MAX_FDS_PER_FRAME:
            raise ProtocolError(f"{count} descriptors were announced")
        self._announced += count
        if self._announced > MAX_FDS_PER_TRANSFER:
            raise ProtocolError("too many descriptors")

    def take_fds(self) -> list[int]:
        """The descriptors that were announced for the message at hand; the caller owns them.

        Raises :class:`ProtocolError` when fewer have come.
        """
        count, self._announced = self._announced, 0
        if len(self._fds) < count:
            raise ProtocolError(f"{len(self._fds)} descriptors came, {count} were announced")
        fds, self._fds = self._fds[:count], self._fds[count:]
        return fds

    def queue(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Has ``message`` sent, with copies of ``fds`` on frames in front of it.

        Copies, because a frame may wait for its peer longer than the generation lives whose
        descriptors it carries, and a number that is closed is soon another file's. Raises
        ``ConnectionError`` when the peer has left too much unread, and ``OSError``.
        """
        for start in range(0, len(fds), MAX_FDS_PER_FRAME):
            batch = fds[start : start + MAX_FDS_PER_FRAME]
            self._queue_frame(encode_frame(Descriptors(count=len(batch))), batch)
        self._queue_frame(encode_frame(message), ())
        self.flush()

    def _queue_frame(self, frame: bytes, fds: Sequence[int]) -> None:
        self._out_bytes += len(frame)
        if self._out_bytes > MAX_QUEUED_BYTES:
            raise ConnectionAbortedError("the peer does not read its answers")
        copies: list[int] = []
        self._out.append((memoryview(frame), copies))
        for fd in fds:
            copies.append(os.dup(fd))

    def flush(self) -> None:
        """Sends what the socket takes now."""
        while self._out:
            frame, fds = self._out.popleft()
            try:
                sent = send(self._socket, frame, fds)
            except BlockingIOError:
                self._out.appendleft((frame, fds))
                return
            close_all(fds)
            self._out_bytes -= sent
            if sent < len(frame):
                self._out.appendleft((frame[sent:], []))

    def close(self) -> None:
        close_all(self._fds)
        self._fds = []
        for _, copies in self._out:
            close_all(copies)
        self._out.clear()
        self._socket.close()
