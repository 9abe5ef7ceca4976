"""A daemon that outlived its supervisor: finding it, and having it hand its descriptors over again.

The conversation is kept in the supervisor's own loop: the daemon sends its descriptors to the
notify socket, which must be served meanwhile.
"""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from wcache.errors import NoPermissionError, ProtocolError, TryAgainError, WcacheError
from wcache.paths import RankId, check_socket_path
from wcache.protocol.control import own_command
from wcache.protocol.messages import (
    AskReport,
    FrameReader,
    Hello,
    Refused,
    Reply,
    Report,
    StoreAgain,
    Stored,
    Welcome,
    encode_frame,
)
from wcache.protocol.replies import decode_reply
from wcache.protocol.wire import close_all, peer_credentials, receive
from wcache.state import loads
from wcache.supervise.direct.loop import Loop
from wcache.supervise.spawn import Process


@dataclass(frozen=True, slots=True)
class FoundDaemon:
    """Somebody who listens on a rank's control socket; whoever takes it owns both."""

    connection: socket.socket
    process: Process

    def close(self) -> None:
        self.connection.close()
        self.process.close()


@dataclass(frozen=True, slots=True)
class TakeoverResult:
    """What a daemon that was found has said."""

    stored: int = 0
    """Descriptors that it handed over."""
    loading: bool = False
    """A loader is at work for it already."""
    problem: str = ""
    """Why its descriptors were not handed over."""


def find_daemon(path: Path) -> FoundDaemon | None:
    """Who listens on ``path``, or None. Does not block.

    Raises :class:`TryAgainError` when it can not be told just now, and :class:`WcacheError` when
    somebody listens who can not be supervised from here.
    """
    check_socket_path(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connection.connect(str(path))
        return FoundDaemon(connection, _listener(connection, path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except BlockingIOError:
        connection.close()
        raise TryAgainError(f"{path} takes no more connections now") from None
    except PermissionError:
        connection.close()
        raise NoPermissionError(f"no permission to use {path}") from None
    except BaseException:
        connection.close()
        raise


def lost_socket(pid: int) -> str:
    """Of a daemon that is up, and is known by its name alone."""
    who = f"pid {pid}" if pid else "a process that can not be seen from here"
    return f"its daemon ({who}) has lost its socket, which it makes again within a second"


def connect_again(path: Path, pid: int) -> socket.socket:
    """A new connection to the daemon ``pid``; raises :class:`WcacheError` if another answers."""
    found = find_daemon(path)
    if found is None:
        raise WcacheError(f"pid {pid} does not answer on {path}")
    found.process.close()
    if found.process.pid != pid:
        found.connection.close()
        raise WcacheError(f"{path} is answered by pid {found.process.pid}, not by pid {pid}")
    return found.connection


def _listener(connection: socket.socket, path: Path) -> Process:
    """The process at the other end: for a client SO_PEERCRED names who called listen(2)."""
    owner = peer_credentials(connection)
    if owner.uid not in (0, os.geteuid()):
        raise NoPermissionError(f"{path} is answered by uid {owner.uid}, neither root nor you")
    if owner.pid == 0:
        raise WcacheError(
            f"{path} is answered from another pid namespace",
            hint="one supervisor keeps an instance: stop the daemon where it runs",
        )
    try:
        return Process(owner.pid, os.pidfd_open(owner.pid), is_child=False)
    except ProcessLookupError:
        raise TryAgainError(f"pid {owner.pid}, which listened on {path}, has just ended") from None


class Takeover:
    """Asks a daemon that was found to store its descriptors again; one use.

    ``done`` is called once, from the loop, unless :meth:`cancel` was called before.
    """

    def __init__(
        self,
        loop: Loop,
        rank: RankId,
        pid: int,
        connection: socket.socket,
        deadline: float,
        done: Callable[[TakeoverResult], None],
    ) -> None:
        self._loop = loop
        self._rank = rank
        self._pid = pid
        self._connection = connection
        self._done = done
        self._reader = FrameReader()
        self._stored: int | None = None
        self.deadline = deadline
        loop.watch(self._connection.fileno(), self._read)

    def begin(self) -> None:
        """Greets the daemon; an answer or ``done`` comes from the loop."""
        self._say(Hello(role="operator", command=own_command()))

    def tick(self, now: float) -> None:
        if now >= self.deadline:
            self._end(TakeoverResult(problem="it does not answer"))

    def cancel(self) -> None:
        self._loop.unwatch(self._connection.fileno())
        self._connection.close()

    def _end(self, result: TakeoverResult) -> None:
        self.cancel()
        self._done(result)

    def _give_up(self, problem: str) -> None:
        """What is stored already stays stored, whatever went wrong after it."""
        if self._stored is None:
            self._end(TakeoverResult(problem=problem))
        else:
            self._end(TakeoverResult(stored=self._stored))

    def _say(self, message: msgspec.Struct) -> None:
        try:
            # A few hundred bytes on a connection that carries nothing else: they go whole.
            self._connection.send(encode_frame(message))
        except OSError as error:
            self._give_up(f"connection lost: {error}")

    def _read(self) -> None:
        try:
            data, fds = receive(self._connection)
            close_all(fds)
            if not data:
                self._give_up("it closed the connection")
                return
            for body in self._reader.feed(data):
                self._take(decode_reply(body))
                if self._connection.fileno() < 0:
                    return
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            self._give_up(str(error))

    def _take(self, reply: Reply) -> None:
        match reply:
            case Welcome():
                # It answers after its pidfd was opened, so the pidfd is of this process and not of
                # a later one with the same number.
                who = (reply.instance, reply.rank, reply.pid)
                if who != (self._rank.instance, self._rank.rank, self._pid):
                    self._give_up(f"it says that it is rank {who[0]}:{who[1]}, pid {who[2]}")
                else:
                    self._say(StoreAgain())
            case Stored():
                self._stored = reply.count
                self._say(AskReport())
            case Report():
                self._end(TakeoverResult(self._stored or 0, loading=loads(reply.state)))
            case Refused():
                self._give_up(f"it refuses: {reply.message}")
            case _:
                self._give_up(f"it answers with {type(reply).__name__}")
