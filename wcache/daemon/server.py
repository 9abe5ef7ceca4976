"""The control socket: who is connected, and one loop that serves them all."""

import logging
import os
import selectors
import socket
import time
from pathlib import Path

from wcache.config import AccessSection
from wcache.daemon.access import group_of, socket_mode
from wcache.daemon.connection import Connection
from wcache.daemon.conversation import handle
from wcache.daemon.rank import Rank
from wcache.daemon.refusals import Refusals
from wcache.errors import ProtocolError, TryAgainError
from wcache.paths import RankPaths, check_socket_path
from wcache.protocol.messages import REQUESTS, Refused, decode_body
from wcache.protocol.name import Name
from wcache.protocol.socket_file import SocketFile

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
# Of all users together that are neither root nor the daemon's own: the others keep their room.
MAX_OTHERS = 768
BACKLOG = 128
ACCEPT_PAUSE_S = 0.05
COMPLAINT_PERIOD_S = 60.0


class Server:
    """Serves one rank; :meth:`step` is called again and again by the daemon's loop."""

    def __init__(self, paths: RankPaths, rank: Rank) -> None:
        self._paths = paths
        self._rank = rank
        self._connections: dict[int, Connection] = {}
        self._next_number = 1
        self._complained = -COMPLAINT_PERIOD_S
        self._refusals = Refusals()
        self._selector = selectors.DefaultSelector()
        self._access: AccessSection | None = None
        self._lost = ""
        """Why the socket's file could not be made again."""
        self._listener, self._file = _listen(paths.socket, rank.access)
        self.apply_access(rank.access)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def wake_by(self, fd: int) -> None:
        """Has :meth:`step` return when ``fd`` becomes readable: the signals' pipe."""
        self._selector.register(fd, selectors.EVENT_READ)

    def answer_for(self, name: Name) -> None:
        """Lets go of who looks this daemon's name up."""
        self._selector.register(name, selectors.EVENT_READ)

    def restore(self) -> bool:
        """Listens on the socket's path again if its file was removed; True when it was.

        Whoever is connected stays so. That it can not be done is logged, and tried again.
        """
        if self._file.is_there:
            return False
        try:
            listener, file = _listen(self._paths.socket, self._rank.access)
        except (OSError, TryAgainError) as error:
            if str(error) != self._lost:
                log.error("the socket was removed and can not be made again: %s", error)
            self._lost = str(error)
            return False
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener, self._file, self._lost = listener, file, ""
        self._selector.register(listener, selectors.EVENT_READ)
        log.warning("%s was removed, it is made again", self._paths.socket)
        return True

    def apply_access(self, access: AccessSection) -> None:
        """Sets the socket's group and mode; who connects is checked again by credentials."""
        if access == self._access:
            return
        self._access = access
        _permit(self._paths.socket, access)

    def step(self, timeout_s: float) -> None:
        """Waits for at most ``timeout_s`` and serves whoever has something to say."""
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, Connection):
                self._serve(key.fileobj, events)
            elif isinstance(key.fileobj, Name):
                key.fileobj.hang_up()
            else:
                os.read(key.fd, 4096)
        now = time.monotonic()
        for peer in [p for p in self._connections.values() if p.is_overdue(now)]:
            log.warning("pid %d said half a message and nothing more", peer.peer.pid)
            self._end(peer)

    def close(self) -> None:
        """Ends every conversation and removes the socket, as far as it is still ours."""
        for peer in list(self._connections.values()):
            self._selector.unregister(peer)
            peer.close()
        self._connections.clear()
        self._file.remove()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:  # the peer is gone again, or descriptors are short
            if time.monotonic() - self._complained > COMPLAINT_PERIOD_S:
                self._complained = time.monotonic()
                log.warning("connections can not be accepted: %s", error)
            # The listener stays readable meanwhile: without a pause the loop would spin.
            time.sleep(ACCEPT_PAUSE_S)
            return
        peer = Connection(self._next_number, accepted)
        self._next_number += 1
        if self._has_too_many(peer):
            if time.monotonic() - self._complained > COMPLAINT_PERIOD_S:
                self._complained = time.monotonic()
                log.warning("too many connections, uid %d is refused", peer.peer.uid)
            peer.close()
            return
        self._connections[peer.number] = peer
        self._selector.register(peer, selectors.EVENT_READ)

    def _has_too_many(self, peer: Connection) -> bool:
        if len(self._connections) >= MAX_CONNECTIONS:
            return True
        own = (0, os.geteuid())
        if peer.peer.uid in own:
            return False
        others = sum(other.peer.uid not in own for other in self._connections.values())
        return others >= MAX_OTHERS

    def _serve(self, peer: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                peer.flush()
            if events & selectors.EVENT_READ:
                self._converse(peer)
        except ProtocolError as error:
            log.warning("pid %d does not keep to the protocol: %s", peer.peer.pid, error.message)
            self._say_last(peer, Refused(reason="bad_request", message=error.message))
            self._end(peer)
            return
        except OSError:  # its end of the connection is gone
            self._end(peer)
            return
        if peer.closing and not peer.wants_to_write:
            self._end(peer)
            return
        write = selectors.EVENT_WRITE if peer.wants_to_write else 0
        self._selector.modify(peer, selectors.EVENT_READ | write)

    def _converse(self, peer: Connection) -> None:
        for body in peer.read():
            if peer.closing:
                return
            message = decode_body(body, REQUESTS)
            handle(message, peer, self._rank, self._paths.id, os.getpid(), self._refusals)

    def _say_last(self, peer: Connection, refusal: Refused) -> None:
        try:
            peer.queue(refusal)
        except OSError:
            return

    def _end(self, peer: Connection) -> None:
        self._selector.unregister(peer)
        peer.close()
        del self._connections[peer.number]
        self._rank.peer_gone(peer.number)


def _permit(path: Path, access: AccessSection) -> None:
    group = group_of(access)
    try:
        if group is not None:
            os.chown(path, -1, group)
        path.chmod(socket_mode(access))
    except OSError as error:
        log.error("permissions of %s can not be set: %s", path, error)


def _listen(path: Path, access: AccessSection) -> tuple[socket.socket, SocketFile]:
    """Binds ``path``, in place of what a daemon that was killed has left there.

    Raises :class:`TryAgainError` when somebody answers on it.
    """
    check_socket_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
            raise TryAgainError(
                f"another daemon answers on {path}", hint="wcache status shows its pid"
            )
        except (FileNotFoundError, ConnectionRefusedError):
            path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Made under another name and without permissions, and renamed when its mode is set: nobody
    # connects too early, and a daemon killed in between leaves nothing in its successor's way.
    made = check_socket_path(path.with_name("new.sock"))
    made.unlink(missing_ok=True)
    before = os.umask(0o777)
    try:
        listener.bind(str(made))
    finally:
        os.umask(before)
    _permit(made, access)
    listener.listen(BACKLOG)
    made.rename(path)
    listener.setblocking(False)
    return listener, SocketFile(path)
