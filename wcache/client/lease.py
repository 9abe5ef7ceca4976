"""A client's lease: keeps the connection that says that the weights are in use, without torch."""

import logging
import os
import select
import threading
import weakref

from wcache.client.descriptors import MappedDescriptors
from wcache.errors import NotReadyError, ProtocolError, WcacheError
from wcache.paths import RankPaths
from wcache.protocol.control import Control
from wcache.protocol.messages import Leased, Message, Offer, Offered, OfferWanted, Refused, Renew

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
_RENEW_TIMEOUT_S = 5.0

HELD = "held"
RENEWING = "renewing"


class Lease:
    """Holds a connection to a rank's daemon and, when it ends, takes the lease up again.

    A thread of its own waits for the connection's end, reconnects with a growing pause for as long
    as it takes, and asks for the same generation. A daemon that has lost it, and wants it, is given
    the descriptors that were kept. Only a daemon that says that it does not hold that generation
    any more ends the lease for good; the mapped weights stay valid even then.

    The lease belongs to the process that attached. In a forked child the inherited connection is
    closed and the lease is lost, so that it ends with the parent; a child that needs one of its
    own attaches again.
    """

    def __init__(
        self,
        paths: RankPaths,
        control: Control,
        manifest_digest: str,
        descriptors: MappedDescriptors | None = None,
    ) -> None:
        """Takes ownership of ``control``, on which the weights were attached.

        And of ``descriptors``, which are closed when the lease ends, once this has returned.
        """
        self._paths = paths
        self._digest = manifest_digest
        self._descriptors = descriptors or MappedDescriptors((), ())
        self._state = HELD
        self._pause_s = FIRST_PAUSE_S
        self._control: Control | None = control
        # Readable once the lease is released. Only release() writes to it, once, and only the
        # thread closes it, after it has read that: no write can reach a descriptor used anew.
        self._released = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._releasing = threading.Lock()
        name = f"wcache-lease-{paths.id}"
        self._thread = threading.Thread(target=self._keep, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads
            os.close(self._released)
            raise
        _leases.add(self)

    @property
    def state(self) -> str:
        """``held``, ``renewing``, or ``lost: `` and the reason."""
        return self._state

    def close(self) -> None:
        """Ends the lease; when it was held it has ended on return. Safe to call twice."""
        was_held = self._state == HELD
        self.release()
        # While it is being renewed the thread may be waiting for a silent daemon; it ends by
        # itself, and there is no lease to wait for.
        if was_held and threading.current_thread() is not self._thread:
            self._thread.join(_RENEW_TIMEOUT_S)

    def release(self) -> None:
        """Has the lease ended soon; takes no lock, so the garbage collector may call it."""
        if self._releasing.acquire(blocking=False):
            os.eventfd_write(self._released, 1)

    # --- the thread -----------------------------------------------------------------------

    def _keep(self) -> None:
        while (control := self._control) is not None and not self._lasts(control):
            control.close()
            log.warning(
                "daemon of rank %s is gone: the weights stay mapped, the lease is being renewed",
                self._paths.id,
            )
            self._state = RENEWING
            self._control = None
            self._renew()
        # Of no more use: either the lease is lost for good, or it was released.
        self._descriptors.close()
        self._is_released(None)
        if self._control is not None:
            # A child that was forked behind Python's back has this socket too: closing this end
            # alone would not end the lease.
            self._control.channel.shutdown()
            self._control.close()
            self._control = None
        self._state = "lost: closed"
        wake, self._released = self._released, -1
        os.close(wake)

    def _lasts(self, control: Control) -> bool:
        """Waits; True when the lease was released, False when the connection ended."""
        poll = select.poll()
        poll.register(self._released, select.POLLIN)
        poll.register(control.channel, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if self._released in ready:
                return True
            try:
                # The daemon says nothing unasked, so a message is one of a later protocol.
                control.channel.receive_body()
            except (OSError, WcacheError):
                return False

    def _renew(self) -> None:
        """Reconnects until there is a lease again, or it was released or lost for good."""
        self._pause_s = FIRST_PAUSE_S
        while True:
            forks = _forks
            try:
                self._control = self._renewed()
            except WcacheError as error:
                refusal = getattr(error, "refusal", None)
                if isinstance(refusal, Refused) and refusal.reason == "gone":
                    log.warning("lease is lost, the weights stay mapped: %s", refusal.message)
                    self._state = f"lost: {refusal.message}"
                    return
            except OSError:
                pass  # the daemon is not back, or went again: the next round asks anew
            if self._control is not None and _is_own(forks):
                # As loud as its end was: most engines show no more than warnings of ours.
                log.warning("lease on rank %s is renewed", self._paths.id)
                self._state = HELD
                return
            if self._control is not None:
                self._control.channel.shutdown()
                self._control.close()
                self._control = None
            if self._is_released(self._pause_s):
                return
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _renewed(self) -> Control:
        """A connection with a lease; raises when the daemon gives none yet."""
        control = Control.connect(self._paths, "client", timeout_s=_RENEW_TIMEOUT_S)
        try:
            fds = self._descriptors.fds
            answer = control.request(
                Renew(manifest_digest=self._digest, can_offer=bool(fds)), Message
            )
            if isinstance(answer, OfferWanted):
                control.request(Offer(slabs=self._descriptors.slabs), Offered, fds)
                log.warning(
                    "daemon of rank %s has lost the weights and was given them", self._paths.id
                )
                self._pause_s = FIRST_PAUSE_S
                raise NotReadyError(f"rank {self._paths.id} checks what it was given")
            if not isinstance(answer, Leased):
                raise ProtocolError(f"answer is a {type(answer).__name__}, not a Leased")
        except BaseException:
            control.close()
            raise
        return control

    def _is_released(self, timeout_s: float | None) -> bool:
        """Waits until the lease is released, for ``timeout_s`` at most."""
        poll = select.poll()
        poll.register(self._released, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    # --- fork -----------------------------------------------------------------------------

    def _forget(self) -> None:
        """Leaves the lease to the parent, in a child that was just forked."""
        if self._control is not None:
            self._control.close()
            self._control = None
        self._descriptors.close()
        if self._releasing.acquire(blocking=False):
            self._state = "lost: this process was forked from the one that holds it"
            # The counter behind it is the parent's too: a write would end the parent's lease.
            os.close(self._released)


# A connection that the thread was making while another thread forked is in the child as well, where
# nobody knows of it, and would outlive the parent. The counter is odd while a fork is under way;
# a connection is kept only if it was even, and the same, from before it was made until the lease
# knew it. The lock keeps two forks apart and is never waited for by a lease's thread.
_forks = 0
_fork_lock = threading.Lock()
_leases: "weakref.WeakSet[Lease]" = weakref.WeakSet()


def _is_own(forks_before: int) -> bool:
    return forks_before % 2 == 0 and forks_before == _forks


def _before_fork() -> None:
    global _forks
    _fork_lock.acquire()
    _forks += 1


def _after_fork_in_parent() -> None:
    global _forks
    _forks += 1
    _fork_lock.release()


def _after_fork_in_child() -> None:
    global _forks
    _forks += 1
    _fork_lock.release()
    for lease in list(_leases):
        lease._forget()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
