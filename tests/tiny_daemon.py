"""A server that speaks the control protocol in this process, and lies when it is told to."""

import queue
import socket
import threading
from collections.abc import Callable, Sequence

from tests.processes import PATIENCE_S
from wcache import manifest as manifests
from wcache.errors import ProtocolError
from wcache.manifest import Manifest, SlabInfo
from wcache.memory.memfd import create_sealed
from wcache.memory.slab import Slab
from wcache.paths import RankPaths
from wcache.protocol.control import Channel
from wcache.protocol.messages import (
    REQUESTS,
    AskLoad,
    Attach,
    Attached,
    Descriptors,
    Hello,
    Leased,
    Offer,
    Offered,
    Refused,
    Renew,
    Reply,
    Welcome,
    decode_body,
)
from wcache.protocol.wire import close_all

Question = Attach | AskLoad | Renew | Offer
Answer = Callable[[Question], Reply | None]


class TinyDaemon:
    """Answers for one rank; what it was asked, and each end of a connection, is in ``events``."""

    def __init__(self, paths: RankPaths) -> None:
        self.paths = paths
        self.events: queue.Queue[str] = queue.Queue()
        self.fds: list[int] = []
        """Go out with every :class:`Attached`."""
        self.offered: list[int] = []
        """What came with every :class:`Offer`."""
        self.attached: Attached | None = None
        self.answer: Answer = self.usual
        self._listener: socket.socket | None = None
        self._peers: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def serve(self, manifest: Manifest, slabs: Sequence[Slab]) -> None:
        """Has ``manifest`` and ``slabs``, which it takes, given to whoever attaches."""
        data = manifests.encode(manifest)
        self.fds = [create_sealed("test-manifest", data), *(slab.fd for slab in slabs)]
        self.attached = Attached(
            generation=1, manifest_digest=manifests.digest(data), slabs=manifest.slabs
        )

    def said(self, slabs: tuple[SlabInfo, ...], digest: str = "") -> None:
        """Changes what :class:`Attached` says."""
        assert self.attached is not None
        digest = digest or self.attached.manifest_digest
        self.attached = Attached(generation=1, manifest_digest=digest, slabs=slabs)

    def usual(self, request: Question) -> Reply:
        if isinstance(request, Renew):
            return Leased(generation=1)
        if isinstance(request, Offer):
            return Offered()
        assert self.attached is not None
        return self.attached

    def start(self) -> None:
        self.paths.folder.mkdir(parents=True, exist_ok=True)
        self.paths.socket.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.paths.socket))
        self._listener.listen()
        self._begin(self._accept, self._listener)

    def stop(self) -> None:
        """Dies: nobody listens, and every connection has ended."""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[:1]:
            thread.join(PATIENCE_S)
        for peer in self._peers:
            try:
                peer.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # closed already
        for thread in self._threads:
            thread.join(PATIENCE_S)
        if self._listener is not None:
            self._listener.close()
        self._listener, self._peers, self._threads = None, [], []

    def close(self) -> None:
        self.stop()
        close_all([*self.fds, *self.offered])

    def next_event(self) -> str:
        return self.events.get(timeout=PATIENCE_S)

    def _begin(self, work: Callable[[socket.socket], None], connection: socket.socket) -> None:
        thread = threading.Thread(target=work, args=(connection,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._peers.append(connection)
            self._begin(self._converse, connection)

    def _converse(self, connection: socket.socket) -> None:
        channel = Channel(connection)
        try:
            while True:
                request = decode_body(channel.receive_body(), REQUESTS)
                if isinstance(request, Hello):
                    rank = self.paths.id
                    channel.send(Welcome(instance=rank.instance, rank=rank.rank, pid=1))
                    continue
                if isinstance(request, Descriptors):
                    continue
                assert isinstance(request, Question)
                if isinstance(request, Offer):
                    self.offered += channel.take_fds(1 + len(request.slabs))
                self.events.put(type(request).__name__.lower())
                reply = self.answer(request)
                if reply is None:
                    break
                channel.send(reply, self.fds if isinstance(reply, Attached) else ())
        except (ConnectionError, ProtocolError):
            pass  # the peer's end
        channel.close()
        self.events.put("end")


def gone() -> Refused:
    return Refused(reason="gone", message="rank 0 does not hold that generation any more")
