"""The datagram socket on which one rank's daemon speaks to its supervisor."""

import array
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path

from wcache.paths import check_socket_path
from wcache.protocol.socket_file import SocketFile
from wcache.protocol.wire import close_all
from wcache.supervise.direct.notify_message import MAX_MESSAGE_BYTES

# The kernel's own limit for one message (SCM_MAX_FD).
_MAX_FDS = 253
_INT_BYTES = array.array("i").itemsize
_CREDENTIALS = struct.Struct("iII")


@dataclass(slots=True)
class Datagram:
    """One message as it came; whoever takes it owns ``fds``."""

    data: bytes
    fds: list[int] = field(default_factory=list)
    pid: int = 0
    """The sender, by the kernel's word; 0 when it is not known."""
    problem: str = ""
    """Why the message can not be used."""


class NotifySocket:
    """Bound at a path, so that a daemon finds a supervisor that came back in its place."""

    def __init__(self, path: Path) -> None:
        self.path = check_socket_path(path)
        self._socket, self._file = _bind(path)

    @property
    def is_reachable(self) -> bool:
        """False when its file was removed."""
        return self._file.is_there

    def restore(self) -> None:
        """Binds the path again; what was not received yet is lost. Raises ``OSError``."""
        made, file = _bind(self.path)
        self._end()
        self._socket, self._file = made, file

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Datagram | None:
        """The next message, or None when there is none; descriptors are close-on-exec."""
        space = socket.CMSG_SPACE(_MAX_FDS * _INT_BYTES) + socket.CMSG_SPACE(_CREDENTIALS.size)
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                MAX_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        datagram = Datagram(data)
        for level, kind, payload in ancillary:
            if level != socket.SOL_SOCKET:
                continue
            if kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % _INT_BYTES])
                datagram.fds += received
            elif kind == socket.SCM_CREDENTIALS and len(payload) == _CREDENTIALS.size:
                datagram.pid = _CREDENTIALS.unpack(payload)[0]
        if flags & socket.MSG_CTRUNC:
            datagram.problem = "descriptors were lost, too many are open here"
        elif flags & socket.MSG_TRUNC:
            datagram.problem = f"message of more than {MAX_MESSAGE_BYTES} bytes"
        return datagram

    def close(self) -> None:
        self._file.remove()
        self._end()

    def _end(self) -> None:
        while datagram := self.receive():
            close_all(datagram.fds)
        self._socket.close()


def _bind(path: Path) -> tuple[socket.socket, SocketFile]:
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        # Before the first message can come in, or that one would be without credentials.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        made.bind(str(path))
        return made, SocketFile(path)
    except OSError:
        made.close()
        raise
