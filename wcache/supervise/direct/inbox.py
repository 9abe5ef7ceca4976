"""What a rank's daemon says and what it hands over for safekeeping."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from wcache.errors import ProtocolError
from wcache.paths import RankId
from wcache.protocol.wire import close_all
from wcache.supervise.direct.notify_message import NotifyMessage, parse
from wcache.supervise.direct.notify_socket import Datagram, NotifySocket
from wcache.supervise.direct.store import DescriptorStore

log = logging.getLogger(__name__)

# So many messages are taken in a row; then the other ranks have their turn.
_MESSAGES_A_TURN = 1024


class Inbox:
    """A rank's notify socket and the store that its messages fill."""

    def __init__(self, rank: RankId, path: Path) -> None:
        self._rank = rank
        self._socket = NotifySocket(path)
        self.store = DescriptorStore()
        self._lost = False
        """A descriptor that was to be stored was not, since the last BARRIER=1."""

    @property
    def path(self) -> Path:
        return self._socket.path

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_reachable(self) -> bool:
        """False when the socket's file was removed."""
        return self._socket.is_reachable

    def restore(self) -> None:
        """Makes the socket again, by another descriptor. Raises ``OSError``."""
        self._socket.restore()

    def messages(self, main_pid: int) -> Iterator[NotifyMessage]:
        """Yields what the process ``main_pid`` has said, its descriptors being stored already.

        Everybody else is refused, as with NotifyAccess=main. The descriptor of a BARRIER=1 is
        closed like any that is not to be stored: in its turn, which is all that it asks for.
        """
        for _ in range(_MESSAGES_A_TURN):
            datagram = self._socket.receive()
            if datagram is None:
                return
            try:
                message = self._parse(datagram, main_pid)
                if message:
                    self._keep(message, datagram)
                    if message.barrier:
                        self._confirm(datagram)
                    yield message
            finally:
                close_all(datagram.fds)

    def close(self) -> None:
        self._socket.close()
        self.store.clear()

    def _confirm(self, barrier: Datagram) -> None:
        """Closes the pipe's end, as systemd does; a byte in it says that something was lost."""
        if self._lost and barrier.fds:
            with contextlib.suppress(OSError):
                os.write(barrier.fds[0], b"!")
        self._lost = False

    def _parse(self, datagram: Datagram, main_pid: int) -> NotifyMessage | None:
        if not main_pid or datagram.pid != main_pid:
            log.warning("rank %s: message of pid %d, which is not the daemon, is refused",
                        self._rank, datagram.pid)  # fmt: skip
            return None
        try:
            if datagram.problem:
                raise ProtocolError(datagram.problem)
            return parse(datagram.data)
        except ProtocolError as error:
            self._lost = True
            log.error("rank %s: message is refused: %s", self._rank, error.message)
            return None

    def _keep(self, message: NotifyMessage, datagram: Datagram) -> None:
        """What is stored is taken out of ``datagram``; its other descriptors get closed."""
        if message.remove:
            if message.name is not None:
                self.store.remove(message.name)
        elif message.store:
            while datagram.fds:
                if problem := self.store.add(message.store_name, datagram.fds.pop(0)):
                    self._lost = True
                    log.error("rank %s: descriptor %s is not stored: %s",
                              self._rank, message.store_name, problem)  # fmt: skip
