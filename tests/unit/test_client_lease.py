"""A lease over the daemon's end, its return, its loss, and a fork."""

import fcntl
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.places import Places
from tests.processes import PATIENCE_S, end, wait_for
from tests.tiny_daemon import Question, TinyDaemon, gone
from wcache.client.descriptors import MappedDescriptors
from wcache.client.lease import Lease
from wcache.manifest import SlabInfo
from wcache.protocol.control import Control
from wcache.protocol.messages import Leased, Offer, Offered, OfferWanted, Refused, Renew, Reply

pytestmark = pytest.mark.unit

DIGEST = "sha256:" + "0" * 64


@pytest.fixture
def daemon(places: Places) -> Iterator[TinyDaemon]:
    made = TinyDaemon(places.rank())
    made.start()
    yield made
    made.close()


@pytest.fixture
def lease(daemon: TinyDaemon) -> Iterator[Lease]:
    made = Lease(daemon.paths, Control.connect(daemon.paths, "client"), DIGEST)
    yield made
    made.close()


def test_closing_ends_the_connection(daemon: TinyDaemon, lease: Lease) -> None:
    assert lease.state == "held"
    lease.close()
    lease.close()
    assert lease.state.startswith("lost")
    assert daemon.next_event() == "end"


def test_lease_is_renewed_when_the_daemon_is_back(
    daemon: TinyDaemon, lease: Lease, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    def answer(request: Question) -> Reply:
        assert isinstance(request, Renew)
        asked.append(request.manifest_digest)
        # Not ready, busy: a daemon that is coming up. None of it is the end of the lease.
        if len(asked) < 4:
            return Refused(reason="not_ready", message="rank 0 is not ready")
        return Leased(generation=1)

    daemon.answer = answer
    caplog.set_level(logging.INFO)
    daemon.stop()
    wait_for(lambda: lease.state == "renewing", "the outage is noticed")
    daemon.start()
    wait_for(lambda: lease.state == "held", "the lease is renewed")
    assert asked == [DIGEST] * 4
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


def test_lease_survives_one_outage_after_another(daemon: TinyDaemon, lease: Lease) -> None:
    for _ in range(3):
        daemon.stop()
        wait_for(lambda: lease.state == "renewing", "the outage is noticed")
        daemon.start()
        wait_for(lambda: lease.state == "held", "the lease is renewed")


def test_generation_that_is_gone_loses_the_lease_for_good(
    daemon: TinyDaemon, lease: Lease, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.answer = lambda _: gone()
    daemon.stop()
    daemon.start()
    wait_for(lambda: lease.state.startswith("lost: rank 0 does not hold"), "the lease is lost")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "stay mapped" in warnings[1]
    lease.close()
    lease._thread.join(PATIENCE_S)
    assert not lease._thread.is_alive()
    events = [daemon.next_event() for _ in range(3)]
    assert events == ["end", "renew", "end"]
    assert daemon.events.empty()


def test_closing_while_the_daemon_is_away_does_not_wait_for_it(
    daemon: TinyDaemon, lease: Lease
) -> None:
    daemon.stop()
    wait_for(lambda: lease.state == "renewing", "the outage is noticed")
    lease.close()
    lease._thread.join(PATIENCE_S)
    assert not lease._thread.is_alive()


def test_unknown_message_of_a_later_daemon_is_passed_over(daemon: TinyDaemon, lease: Lease) -> None:
    body = b'{"type":"new_one"}'
    wait_for(lambda: len(daemon._peers) == 1, "the connection is accepted")
    daemon._peers[0].sendall(len(body).to_bytes(4, "big") + body)
    wait_for(lambda: _unread(daemon._peers[0]) == 0, "the message is taken")
    assert lease.state == "held"
    lease.close()
    assert [daemon.next_event()] == ["end"]
    assert daemon.events.empty()


# --- a daemon that has lost the generation --------------------------------------------------


@pytest.fixture
def giving(daemon: TinyDaemon) -> Iterator[Lease]:
    """A lease with two descriptors that it may give back."""
    fds = [os.memfd_create("kept-manifest"), os.memfd_create("kept-slab")]
    slabs = (SlabInfo(kind="host", nbytes=2 << 20),)
    control = Control.connect(daemon.paths, "client")
    made = Lease(daemon.paths, control, DIGEST, MappedDescriptors(fds, slabs))
    yield made
    made.close()


def _kept() -> list[str]:
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sorted(str(link) for link in links if "memfd:kept" in str(link))


def test_what_is_wanted_is_given_back_once_and_the_lease_is_renewed(
    daemon: TinyDaemon, giving: Lease
) -> None:
    asked: list[Question] = []

    def answer(request: Question) -> Reply:
        asked.append(request)
        if isinstance(request, Offer):
            return Offered()
        if len(asked) < 2:
            return OfferWanted()
        if len(asked) < 5:  # it is being checked
            return Refused(reason="not_ready", message="rank 0 is getting weights")
        return Leased(generation=1)

    daemon.answer = answer
    daemon.stop()
    daemon.start()
    wait_for(lambda: giving.state == "held" and len(asked) == 5, "the lease is renewed")
    renew = Renew(manifest_digest=DIGEST, can_offer=True)
    assert asked == [renew, Offer(slabs=(SlabInfo(kind="host", nbytes=2 << 20),)), *[renew] * 3]
    names = [Path(f"/proc/self/fd/{fd}").readlink().name for fd in daemon.offered]
    assert [name.removesuffix(" (deleted)") for name in names] == [
        "memfd:kept-manifest", "memfd:kept-slab",
    ]  # fmt: skip
    # The next daemon may lose it as well.
    assert len(_kept()) == 4


def test_an_offer_that_is_refused_loses_the_lease_when_the_generation_is_gone(
    daemon: TinyDaemon, giving: Lease
) -> None:
    answers: list[Reply] = [
        OfferWanted(), Refused(reason="invalid", message="other bytes"), gone(),
    ]  # fmt: skip
    daemon.answer = lambda _: answers.pop(0)
    daemon.stop()
    daemon.start()
    wait_for(lambda: giving.state.startswith("lost: rank 0 does not hold"), "the lease is lost")
    wait_for(lambda: len(_kept()) == 2, "nothing is kept for a lease that is lost")
    assert answers == []


def test_a_daemon_that_ends_during_an_offer_is_offered_it_again(
    daemon: TinyDaemon, giving: Lease
) -> None:
    asked: list[Question] = []

    def answer(request: Question) -> Reply | None:
        asked.append(request)
        if len(asked) == 2:
            return None
        if isinstance(request, Offer):
            return Offered()
        return OfferWanted() if len(asked) < 4 else Leased(generation=1)

    daemon.answer = answer
    daemon.stop()
    daemon.start()
    wait_for(lambda: giving.state == "held" and len(asked) == 5, "the lease is renewed")
    assert [type(request) for request in asked] == [Renew, Offer, Renew, Offer, Renew]


def test_a_lease_without_descriptors_says_that_it_has_none(
    daemon: TinyDaemon, lease: Lease
) -> None:
    asked: list[Question] = []

    def answer(request: Question) -> Reply:
        asked.append(request)
        return gone()

    daemon.answer = answer
    daemon.stop()
    daemon.start()
    wait_for(lambda: lease.state.startswith("lost"), "the lease is lost")
    assert asked == [Renew(manifest_digest=DIGEST)]


def _unread(connection: socket.socket) -> int:
    """Bytes that the other end has not read yet (SIOCOUTQ of unix(7))."""
    return struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]  # type: ignore[no-any-return]  # "i" is an int


def test_child_leaves_the_lease_to_its_parent(daemon: TinyDaemon, lease: Lease) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        state = lease.state
        lease.close()  # must not end the parent's
        os.write(write, state.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100).startswith(b"lost: this process was forked")
    os.close(read)
    os.close(write)
    assert lease.state == "held"
    # Only a lease whose thread is still there is renewed.
    daemon.stop()
    wait_for(lambda: lease.state == "renewing", "the outage is noticed")
    daemon.start()
    wait_for(lambda: lease.state == "held", "the lease is renewed")


def test_connection_that_a_fork_copied_while_it_was_made_is_made_again(
    daemon: TinyDaemon, lease: Lease
) -> None:
    """The child would hold the first connection open for as long as it lives."""
    children: list[int] = []
    read, write = os.pipe()

    def fork_and_answer(request: Question) -> Reply:
        if not children:
            child = os.fork()
            if child == 0:
                os.close(write)
                os.read(read, 1)
                os._exit(0)
            children.append(child)
        return Leased(generation=1)

    daemon.answer = fork_and_answer
    daemon.stop()
    daemon.start()
    events = [daemon.next_event() for _ in range(4)]
    assert events == ["end", "renew", "end", "renew"]
    wait_for(lambda: lease.state == "held", "the lease is renewed")
    os.close(write)
    os.close(read)
    os.waitpid(children[0], 0)


_HOLD_AND_FORK = """
import os, sys, time
from wcache.client.descriptors import MappedDescriptors
from wcache.client.lease import Lease
from wcache.protocol.control import Control
from wcache.paths import RankId, RankPaths
assert "torch" not in sys.modules
paths = RankPaths.of(RankId("", 0))
lease = Lease(paths, Control.connect(paths, "client"), "sha256:0")
child = os.fork()
if child == 0:
    os.read(0, 1)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def test_lease_ends_with_its_process_though_a_forked_child_lives(daemon: TinyDaemon) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD_AND_FORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        end(holder, signal.SIGKILL)
        assert daemon.next_event() == "end"
        os.kill(child, 0)  # the child is still there, with all it has inherited
    finally:
        end(holder)
        for pipe in (holder.stdin, holder.stdout):
            assert pipe is not None
            pipe.close()


_HOLD_AND_EXIT = """
from wcache.client.descriptors import MappedDescriptors
from wcache.client.lease import Lease
from wcache.protocol.control import Control
from wcache.paths import RankId, RankPaths
paths = RankPaths.of(RankId("", 0))
lease = Lease(paths, Control.connect(paths, "client"), "sha256:0")
"""


def test_lease_does_not_keep_the_interpreter_alive(daemon: TinyDaemon) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HOLD_AND_EXIT], timeout=PATIENCE_S, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert daemon.next_event() == "end"
