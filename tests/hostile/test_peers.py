"""Peers that misbehave: each is answered or cut off, and nobody else notices."""

import array
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from tests.daemons import Start, attach, published, report
from tests.places import Places, publish_config
from tests.processes import Store, daemon_log, open_files, settled_files, wait_for
from tests.publishing import content, head, manifest, offered, raw_channel
from wcache.config import AccessSection
from wcache.daemon.connection import PATIENCE_S, Connection
from wcache.errors import NoPermissionError, ProtocolError, WcacheError
from wcache.protocol.control import Control, receive_reply
from wcache.protocol.messages import (
    MAX_FRAME_BYTES,
    AskLoad,
    AskReport,
    Attach,
    Attached,
    Descriptors,
    Hello,
    LoadOrder,
    Publish,
    Published,
    Refused,
    Report,
    encode_frame,
)
from wcache.protocol.wire import close_all, receive, send
from wcache.state import RankState

pytestmark = pytest.mark.hostile

DEVNULL = Path("/dev/null")


@pytest.fixture
def served(places: Places, store: Store, start: Start) -> Iterator[int]:
    """A daemon with weights; afterwards it must still give them and hold no more descriptors."""
    places.write_config(publish_config())
    daemon = start()
    published(places, store, [content(b"a")])
    before = settled_files(daemon.pid)
    yield daemon.pid
    wait_for(lambda: open_files(daemon.pid) == before, "every descriptor of the peer is closed")
    with Control.connect(places.rank(), "client") as control:
        _, fds = attach(control)
        assert head(fds[1]) == content(b"a")
        close_all(fds)
    assert daemon.poll() is None, daemon_log(places).read_text()


def send_endlessly(connection: socket.socket, frame: bytes, fds: Sequence[int]) -> None:
    """Returns, and so fails its test, only if 100,000 frames were taken."""
    for _ in range(100_000):
        send(connection, frame, fds)


def refusal(connection: socket.socket) -> dict[str, object]:
    """The one frame that comes before the daemon hangs up."""
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    answer: dict[str, object] = json.loads(data[4:])
    assert answer["type"] == "refused"
    return answer


@pytest.mark.parametrize(
    ("garbage", "said"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "frame of 1195725856 bytes"),
        (b"\xff\xff\xff\xff", "frame of 4294967295 bytes"),
        (b"\x00\x00\x00\x00", "frame of 0 bytes"),
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "big"), f"frame of {MAX_FRAME_BYTES + 1} bytes"),
        (b"\x00\x00\x00\x02{]", "not a message"),
        (b"\x00\x00\x00\x04null", "not a message"),
        (b'\x00\x00\x00\x0f{"type":"exec"}', "not a message"),
        (b'\x00\x00\x00\x10{"type":"hello"}', "not a message"),
        (b"\x00\x00\x00\x03\xff\xfe\xfd", "not a message"),
        ((60000).to_bytes(4, "big") + b"[" * 60000, "not a message"),
    ],
    ids=["http", "huge", "zero", "over", "json", "null", "unknown", "fields", "utf8", "deep"],
)
def test_garbage_is_refused_with_a_reason(
    places: Places, served: int, garbage: bytes, said: str
) -> None:
    connection, _ = raw_channel(places.rank())
    with connection:
        connection.sendall(garbage)
        answer = refusal(connection)
    assert answer["reason"] == "bad_request"
    assert str(answer["message"]).startswith(said)


def test_half_a_frame_and_then_nothing_does_not_keep_others_waiting(
    places: Places, served: int
) -> None:
    connection, _ = raw_channel(places.rank())
    with connection:
        connection.sendall(encode_frame(Hello(role="client", command="slow"))[:9])
        assert report(places).state is RankState.READY


def test_silence_is_cut_off() -> None:
    """In this process, because the real patience is ten seconds."""
    ours, theirs = socket.socketpair()
    with theirs:
        connection = Connection(1, ours)
        now = time.monotonic()
        assert not connection.is_overdue(now)
        assert connection.is_overdue(now + PATIENCE_S + 1)
        connection.close()


def test_frame_in_single_bytes_is_understood(places: Places, served: int) -> None:
    connection, channel = raw_channel(places.rank())
    with connection:
        for byte in encode_frame(Hello(role="operator", command="slow")) + encode_frame(
            AskReport()
        ):
            connection.sendall(bytes([byte]))
        channel.receive_body()
        assert receive_reply(channel, Report).state is RankState.READY


def test_first_message_must_be_hello(places: Places, served: int) -> None:
    connection, _ = raw_channel(places.rank())
    with connection:
        connection.sendall(encode_frame(Attach()))
        assert refusal(connection)["message"] == "the first message must be hello"


def test_other_protocol_version_is_refused_with_the_way_out(places: Places, served: int) -> None:
    connection, _ = raw_channel(places.rank())
    with connection:
        connection.sendall(encode_frame(Hello(version=99, role="client", command="new")))
        answer = refusal(connection)
    assert answer["reason"] == "version"
    assert answer["hint"] == "run the same wcache in daemon, loader and engine"


def test_client_can_not_load_and_loader_can_not_attach(places: Places, served: int) -> None:
    with Control.connect(places.rank(), "client") as control:
        with pytest.raises(WcacheError, match="a client can not send AskLoad"):
            control.request(AskLoad(), LoadOrder)
    with Control.connect(places.rank(), "loader") as control:
        with pytest.raises(WcacheError, match="a loader can not send Attach"):
            control.request(Attach(), Attached)


def test_descriptors_for_no_message_are_closed(places: Places, served: int) -> None:
    with Control.connect(places.rank(), "client") as control, DEVNULL.open() as null:
        with pytest.raises(WcacheError, match="descriptors came for no message"):
            control.request(Attach(), Attached, [null.fileno()] * 10)


def test_endless_descriptors_are_cut_off(places: Places, served: int) -> None:
    connection, channel = raw_channel(places.rank())
    frame = encode_frame(Descriptors(count=240))
    with connection, DEVNULL.open() as null:
        channel.send(Hello(role="client", command="flood"))
        with pytest.raises(ConnectionError):
            send_endlessly(connection, frame, [null.fileno()] * 240)


def test_peer_that_asks_and_never_reads_is_cut_off(places: Places, served: int) -> None:
    connection, channel = raw_channel(places.rank())
    with connection:
        channel.send(Hello(role="operator", command="deaf"))
        connection.settimeout(0.5)
        with pytest.raises((ConnectionError, TimeoutError)):
            send_endlessly(connection, encode_frame(AskReport()), ())


def test_publishing_without_an_order_is_refused(places: Places, served: int) -> None:
    described = manifest()
    with Control.connect(places.rank(), "loader") as control:
        with offered(described, [content(b"x")]) as fds:
            with pytest.raises(WcacheError, match="this peer was not asked to load"):
                control.request(Publish(slabs=described.slabs), Published, fds)


def test_hundreds_of_connections_leave_room_for_a_client(places: Places, served: int) -> None:
    opened = []
    try:
        for _ in range(500):
            opened.append(raw_channel(places.rank())[0])
        assert report(places).state is RankState.READY
    finally:
        for connection in opened:
            connection.close()


def test_user_outside_the_lists_is_refused(places: Places, store: Store, start: Start) -> None:
    """As another user: the socket's mode keeps out who is in no list, SO_PEERCRED the rest."""
    places.root.chmod(0o755)
    places.write_config(publish_config(access=AccessSection(uids=(65533,))))
    start()
    published(places, store, [content(b"a")])
    assert as_user(65533, places, "client") == ""
    assert "uid 65534 may not be a client" in as_user(65534, places, "client")
    assert "uid 65533 may not be a loader" in as_user(65533, places, "loader")


def test_access_that_is_changed_takes_effect_without_a_command(
    places: Places, store: Store, start: Start
) -> None:
    places.root.chmod(0o755)
    places.write_config(publish_config())
    start()
    assert "no permission" in as_user(65533, places, "client")
    places.write_config(publish_config(access=AccessSection(uids=(65533,))))
    wait_for(lambda: as_user(65533, places, "client") == "", "the new list is heeded")


def test_socket_of_a_daemon_without_lists_is_the_owners_alone(
    places: Places, store: Store, start: Start
) -> None:
    places.root.chmod(0o755)
    places.write_config(publish_config())
    start()
    assert places.rank().socket.stat().st_mode & 0o777 == 0o600
    assert "no permission to use" in as_user(65534, places, "client")


def test_daemon_of_another_user_is_not_trusted(places: Places) -> None:
    """A socket that somebody else listens on, in a folder that the victim was pointed at."""
    places.root.chmod(0o777)
    path = places.rank().socket
    path.parent.mkdir(parents=True)
    for folder in (path.parent, path.parent.parent):
        folder.chmod(0o777)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(65533)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            listener.listen()
            os.write(writer, b"x")
            time.sleep(30)
        finally:
            os._exit(0)
    try:
        os.read(reader, 1)
        with pytest.raises(NoPermissionError, match="is answered by uid 65533"):
            Control.connect(places.rank(), "client")
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        close_all([reader, writer])


def as_user(uid: int, places: Places, role: str) -> str:
    """Greets as ``uid``; the error's message, or nothing when it was let in."""
    # The daemon runs as root, which every client trusts.
    return in_child(lambda: Control.connect(places.rank(), role).close(), uid=uid)  # type: ignore[arg-type]  # a Role


def in_child(work: Callable[[], object], *, uid: int | None = None) -> str:
    """Does ``work`` in a forked child; the message of its error, or nothing when there was none."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = "child failed"
        try:
            if uid is not None:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            work()
            said = ""
        except WcacheError as error:
            said = error.message
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader) as answer:
        return answer.read()


def test_lost_descriptors_are_an_error_not_a_short_list() -> None:
    """More than the receiver has room for: the kernel drops the rest and says so."""
    ours, theirs = socket.socketpair()
    with ours, theirs, DEVNULL.open() as null:
        many = array.array("i", [null.fileno()] * 250)
        ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)])
        before = open_files(os.getpid())
        with pytest.raises(ProtocolError, match="descriptors were lost") as caught:
            receive(theirs)
        assert "ulimit -n" in caught.value.hint
        assert open_files(os.getpid()) == before


def test_refusals_have_a_type_that_every_client_can_read() -> None:
    frame = encode_frame(Refused(reason="gone", message="m"))
    said = msgspec.json.decode(frame[4:])
    assert (said["type"], said["reason"], said["message"]) == ("refused", "gone", "m")
