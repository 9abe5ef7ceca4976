"""The direct supervisor's control socket: who is connected, and what they ask."""

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from wcache.errors import ProtocolError
from wcache.paths import check_socket_path
from wcache.protocol.messages import FrameReader, Refused, decode_body, encode_frame
from wcache.protocol.socket_file import SocketFile
from wcache.protocol.wire import close_all, peer_credentials, receive, send
from wcache.supervise.direct.loop import Loop
from wcache.supervise.direct.messages import REQUESTS, Request

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
_BACKLOG = 64
# A peer that asks on and on without reading the answers is let go.
_MAX_UNSENT = 4 << 20


class Peer:
    """One connection. Its requests are answered by :meth:`answer`, at once or later."""

    def __init__(self, connection: socket.socket, server: "ControlServer") -> None:
        connection.setblocking(False)
        self.pid = peer_credentials(connection).pid
        self._socket = connection
        self._server = server
        self._reader = FrameReader()
        self._unsent = bytearray()

    @property
    def is_open(self) -> bool:
        return self._socket.fileno() >= 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def answer(self, message: msgspec.Struct) -> None:
        """Sends as much as the peer takes now and the rest when it takes more."""
        if self.is_open:
            self._unsent += encode_frame(message)
            self._guard(self._flush)

    def serve(self) -> None:
        self._guard(self._flush)
        self._guard(self._read)

    def close(self) -> None:
        self._socket.close()

    def _guard(self, step: Callable[[], None]) -> None:
        if not self.is_open:
            return
        try:
            step()
        except ProtocolError as error:
            log.warning("pid %d does not keep to the protocol: %s", self.pid, error.message)
            self._server.end(self)
        except OSError:  # the peer is gone
            self._server.end(self)

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: send(self._socket, bytes(self._unsent))]
        except BlockingIOError:
            if len(self._unsent) > _MAX_UNSENT:
                raise ProtocolError("it does not read its answers") from None
        self._server.expect_room(self, bool(self._unsent))

    def _read(self) -> None:
        try:
            data, fds = receive(self._socket)
        except BlockingIOError:
            return
        close_all(fds)
        if not data:
            self._server.end(self)
            return
        for body in self._reader.feed(data):
            try:
                request = decode_body(body, REQUESTS)
            except ProtocolError as error:
                self.answer(Refused(reason="bad_request", message=error.message))
                raise
            self._server.handle(self, request)
            if not self.is_open:
                return


class ControlServer:
    """Listens on ``path``; ``handle`` is called with each request."""

    def __init__(self, loop: Loop, path: Path, handle: Callable[[Peer, Request], None]) -> None:
        self.handle = handle
        self._loop = loop
        self._path = check_socket_path(path)
        self._peers: set[Peer] = set()
        self._listener, self._file = _listen(path)
        loop.watch(self._listener.fileno(), self.accept)

    def restore(self) -> bool:
        """Listens on the path again if its file was removed; True when it was. Raises ``OSError``.

        Whoever is connected stays so.
        """
        if self._file.is_there:
            return False
        listener, file = _listen(self._path)
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        self._listener, self._file = listener, file
        self._loop.watch(listener.fileno(), self.accept)
        return True

    @property
    def connections(self) -> int:
        return len(self._peers)

    def accept(self) -> None:
        """Takes one connection if there is one."""
        try:
            connection, _ = self._listener.accept()
        except OSError:  # nobody after all, or descriptors are short for a moment
            return
        owner = peer_credentials(connection)
        if owner.uid not in (0, os.geteuid()) or len(self._peers) >= MAX_CONNECTIONS:
            log.warning("connection of pid %d, uid %d is refused", owner.pid, owner.uid)
            connection.close()
            return
        peer = Peer(connection, self)
        self._peers.add(peer)
        self._loop.watch(peer.fileno(), peer.serve)

    def expect_room(self, peer: Peer, wanted: bool) -> None:
        self._loop.watch_writing(peer.fileno(), wanted)

    def end(self, peer: Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            self._loop.unwatch(peer.fileno())
            peer.close()

    def close(self) -> None:
        for peer in list(self._peers):
            self.end(peer)
        self._loop.unwatch(self._listener.fileno())
        self._file.remove()
        self._listener.close()


def _listen(path: Path) -> tuple[socket.socket, SocketFile]:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # Nobody can connect before the mode is set: the file appears with no permissions at all.
        before = os.umask(0o777)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        path.chmod(0o600)
        listener.listen(_BACKLOG)
        return listener, SocketFile(path)
    except OSError:
        listener.close()
        raise
