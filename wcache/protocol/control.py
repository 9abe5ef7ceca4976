"""The blocking end of a control socket: what loaders, clients and commands talk through."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from wcache.errors import (
    ExitCode,
    MismatchError,
    NoPermissionError,
    NoSuchRankError,
    NotReadyError,
    ProtocolError,
    TryAgainError,
    WcacheError,
)
from wcache.machine.permissions import who_may
from wcache.paths import RankId, RankPaths, check_socket_path
from wcache.protocol.messages import (
    MAX_FDS_PER_FRAME,
    MAX_FDS_PER_TRANSFER,
    MAX_TEXT,
    Descriptors,
    FrameReader,
    Hello,
    Message,
    RefusalReason,
    Refused,
    Request,
    Role,
    Welcome,
    encode_frame,
)
from wcache.protocol.replies import decode_reply, is_unknown
from wcache.protocol.wire import close_all, peer_credentials, receive, send

DEFAULT_TIMEOUT_S = 30.0
COMES_BACK_S = 5.0
"""How long a daemon that has just ended is given: one that crashes, is ended for hanging or is
restarted is back with its weights in 0.1 to 1.5 s, and an engine that gave it up would read the
disk for minutes."""
COMMAND = "WCACHE_COMMAND"
"""The variable by which ``wcache run`` tells all processes of an engine its command line."""
R = TypeVar("R", bound=Message)

_REFUSALS: dict[RefusalReason, type[WcacheError]] = {
    "permission": NoPermissionError,
    "not_ready": NotReadyError,
    "mismatch": MismatchError,
    "busy": TryAgainError,
}


class RefusedError(WcacheError):
    """A daemon's refusal that has no exit code of its own; ``refusal`` is what it said."""

    refusal: Refused


class SilentDaemonError(NoSuchRankError):
    """Somebody listens and does not answer: a daemon that is stuck, not one that is absent."""

    exit_code = ExitCode.TRY_AGAIN


class EndedDaemonError(NoSuchRankError):
    """Somebody listened, and ended: a daemon that its supervisor starts again."""


def refusal_error(refusal: Refused) -> WcacheError:
    """The exception that ``refusal`` becomes; it carries the refusal as ``refusal``."""
    error = _REFUSALS.get(refusal.reason, RefusedError)(refusal.message, hint=refusal.hint)
    if isinstance(error, MismatchError):
        error.differences = refusal.differences
    error.refusal = refusal  # type: ignore[attr-defined]  # set on a sibling class of RefusedError
    return error


class Channel:
    """A connected stream socket that carries messages and descriptors.

    Every call raises :class:`ProtocolError` when the peer does not keep to the protocol, and
    ``ConnectionError`` or ``TimeoutError`` when it is gone or silent.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = FrameReader()
        self._frames: list[bytes] = []
        self._fds: list[int] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def settimeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Sends ``fds`` on frames in front of ``message``."""
        for start in range(0, len(fds), MAX_FDS_PER_FRAME):
            batch = fds[start : start + MAX_FDS_PER_FRAME]
            self._send_frame(encode_frame(Descriptors(count=len(batch))), batch)
        self._send_frame(encode_frame(message), ())

    def _send_frame(self, frame: bytes, fds: Sequence[int]) -> None:
        view = memoryview(frame)
        sent = send(self._socket, view, fds)
        # Not with nothing left: that is a send of its own, and fails if the peer has hung up since.
        if sent < len(view):
            self._socket.sendall(view[sent:])

    def receive_body(self) -> bytes:
        """The content of the next frame; raises ``ConnectionError`` at the end of the stream."""
        while not self._frames:
            data, fds = receive(self._socket)
            self._fds += fds
            if not data:
                raise ConnectionResetError("the other end closed the connection")
            if len(self._fds) > MAX_FDS_PER_TRANSFER:
                raise ProtocolError("too many descriptors")
            self._frames += self._reader.feed(data)
        return self._frames.pop(0)

    def take_fds(self, count: int) -> list[int]:
        """The descriptors that came with the last message; the caller owns them.

        Raises :class:`ProtocolError` when there are not exactly ``count``.
        """
        if len(self._fds) != count:
            raise ProtocolError(f"{len(self._fds)} descriptors came, {count} were announced")
        fds, self._fds = self._fds, []
        return fds

    def shutdown(self) -> None:
        """Ends the conversation for every process that has the socket, forked children too."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        close_all(self._fds)
        self._fds = []
        self._socket.close()


class Control:
    """A conversation with one rank's daemon, opened by :meth:`connect`."""

    def __init__(self, channel: Channel, welcome: Welcome) -> None:
        self.channel = channel
        self.welcome = welcome

    @classmethod
    def connect(
        cls, paths: RankPaths, role: Role, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> "Control":
        """Connects and greets.

        Raises :class:`NoSuchRankError` when nobody listens, :class:`NoPermissionError` when the
        socket belongs to somebody who must not be trusted or does not take us, and
        :class:`WcacheError` when the daemon is silent for ``timeout_s``.
        """
        channel = Channel(connect_socket(paths.socket, f"rank {paths.id}", timeout_s))
        try:
            channel.send(Hello(role=role, command=own_command()))
            welcome = receive_reply(channel, Welcome)
            if (welcome.instance, welcome.rank) != (paths.id.instance, paths.id.rank):
                raise ProtocolError(
                    f"{paths.socket} is answered by rank {welcome.instance}:{welcome.rank}"
                )
        except ConnectionError:
            channel.close()
            raise EndedDaemonError(
                f"daemon of rank {paths.id} has just ended",
                hint="it keeps the weights and comes back: try again",
                exit_code=ExitCode.TRY_AGAIN,
            ) from None
        except TimeoutError as error:
            channel.close()
            raise SilentDaemonError(f"daemon of rank {paths.id} does not answer: {error}") from None
        except BaseException:
            channel.close()
            raise
        return cls(channel, welcome)

    def request(self, message: Request, kind: type[R], fds: Sequence[int] = ()) -> R:
        """Sends ``message`` and returns its answer; raises what a refusal stands for."""
        self.channel.send(message, fds)
        try:
            return receive_reply(self.channel, kind)
        except RefusedError as error:
            if not is_unknown(error.refusal):
                raise
            rank = RankId(self.welcome.instance, self.welcome.rank)
            unknown = RefusedError(
                f"the daemon of rank {rank} is of another wcache, and does not know what it was"
                f" asked for: {type(message).__name__.lower()}",
                hint="wcache restart has it run the installed one, and keeps the weights",
            )
            unknown.refusal = error.refusal
            raise unknown from None

    def tell(self, message: Request) -> None:
        """Sends a message that is not answered."""
        self.channel.send(message)

    def take_fds(self, count: int) -> list[int]:
        """The descriptors that came with the last answer, which the caller owns then.

        Raises :class:`ProtocolError` when there are not exactly ``count``.
        """
        return self.channel.take_fds(count)

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> "Control":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def receive_reply(
    channel: Channel, kind: type[R], decode: Callable[[bytes], Any] = decode_reply
) -> R:
    """The next reply, which must be of ``kind``; a refusal is raised, descriptors are gathered."""
    while True:
        reply = decode(channel.receive_body())
        if isinstance(reply, Refused):
            raise refusal_error(reply)
        if isinstance(reply, Descriptors):
            continue  # they are in front of the answer
        if isinstance(reply, kind):
            return reply
        raise ProtocolError(f"answer is a {type(reply).__name__}, not a {kind.__name__}")


def connect_socket(path: Path, whose: str, timeout_s: float) -> socket.socket:
    """A connected socket whose listener is root or this process's own user.

    ``whose`` names the listener in errors.
    """
    check_socket_path(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        _connect_when_accepted(connection, path, timeout_s)
        owner = peer_credentials(connection).uid
        if owner not in (0, os.geteuid()):
            raise NoPermissionError(
                f"{path} is answered by uid {owner}, which is neither root nor you",
                hint="set WCACHE_RUN_DIR to the folder of the daemons that you want",
            )
    except (FileNotFoundError, ConnectionRefusedError) as error:
        connection.close()
        # Who is stopped removes its socket; who is killed leaves it.
        kind = NoSuchRankError if isinstance(error, FileNotFoundError) else EndedDaemonError
        raise kind(
            f"no daemon answers for {whose}", hint="wcache status shows which ranks are up"
        ) from None
    except PermissionError:
        connection.close()
        raise NoPermissionError(
            f"no permission to use {path}", hint=who_may(path, os.W_OK) or "use sudo"
        ) from None
    except TimeoutError:
        connection.close()
        raise SilentDaemonError(f"{whose} does not answer within {timeout_s:g} s") from None
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_when_accepted(connection: socket.socket, path: Path, timeout_s: float) -> None:
    """connect(2), again while the listener's queue is full, which Unix sockets say at once."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection.connect(str(path))
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(0.01)


def own_command() -> str:
    """What an operator knows this process by, for the daemon's list of leases.

    Its command line, or the one by which ``wcache run`` has started all of an engine: what one of
    its workers was started with tells nothing.
    """
    words = os.environ.get(COMMAND) or " ".join(sys.orig_argv)
    # An argument that is not UTF-8 comes as surrogates, which no message can carry.
    return words[:MAX_TEXT].encode(errors="replace").decode()
