"""What a service says to its supervisor: sd_notify(3) with the descriptor store."""

import array
import logging
import os
import select
import socket
from collections.abc import Sequence

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 5.0
BARRIER_TIMEOUT_S = 5.0


class Notifier:
    """Talks to ``NOTIFY_SOCKET``; without one every call does nothing and nothing is stored.

    The path is resolved anew for each message, so a supervisor that came back is reached.
    """

    def __init__(self, address: str | None, watchdog_s: float | None) -> None:
        self._address = "\0" + address[1:] if address and address[0] == "@" else address
        self._unheard = False
        self._owes_ready = False
        """READY=1 was said to nobody: the supervisor made its socket again at that moment."""
        self.watchdog_s = watchdog_s
        """The supervisor kills a daemon that is silent for so long; None: it does not."""

    @classmethod
    def from_environment(cls) -> "Notifier":
        """Takes the variables out of the environment."""
        address = os.environ.pop("NOTIFY_SOCKET", None)
        period_us = os.environ.pop("WATCHDOG_USEC", "")
        owner = os.environ.pop("WATCHDOG_PID", str(os.getpid()))
        watched = period_us.isdigit() and owner == str(os.getpid())
        return cls(address, int(period_us) / 1e6 if watched else None)

    @property
    def keeps_descriptors(self) -> bool:
        """True when there is a supervisor to hand descriptors to."""
        return self._address is not None

    def say(self, *assignments: str) -> bool:
        """Sends assignments such as ``READY=1``; a supervisor that is gone is no failure."""
        heard = self._send(assignments, ())
        if "READY=1" in assignments:
            self._owes_ready = not heard
        return heard

    def mention(self, *assignments: str) -> bool:
        """Sends what will be said again anyway, and rather drops it than waits."""
        heard = self._send(assignments, (), timeout_s=0)
        if heard and self._owes_ready:
            self.say("READY=1")
        return heard

    def store(self, name: str, fd: int) -> bool:
        """Hands ``fd`` over; FDPOLL=0 because a memfd or a GPU handle can not be polled."""
        return self._send(("FDSTORE=1", "FDPOLL=0", f"FDNAME={name}"), (fd,))

    def remove(self, name: str, *, waits: bool = True) -> bool:
        """Has what is stored under ``name`` given up; False when nobody heard it."""
        timeout_s = SEND_TIMEOUT_S if waits else 0
        return self._send(("FDSTOREREMOVE=1", f"FDNAME={name}"), (), timeout_s=timeout_s)

    def barrier(self) -> bool:
        """Waits until everything said before was taken in; False when that is not confirmed.

        The supervisor closes its end of a pipe when it gets there (sd_notify_barrier(3)). The
        direct supervisor writes into it first when it could not keep a descriptor.
        """
        if not self.keeps_descriptors:
            return True
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            sent = self._send(("BARRIER=1",), (writer,))
            os.close(writer)
            writer = -1
            poll = select.poll()
            poll.register(reader, select.POLLIN | select.POLLHUP)
            if not sent or not poll.poll(BARRIER_TIMEOUT_S * 1000):
                return False
            return not os.read(reader, 1)
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)

    def _send(
        self, assignments: Sequence[str], fds: Sequence[int], timeout_s: float = SEND_TIMEOUT_S
    ) -> bool:
        if self._address is None:
            return False
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
                out.settimeout(timeout_s)
                out.sendmsg(["\n".join(assignments).encode()], rights, 0, self._address)
        except OSError as error:
            # Once an outage: the watchdog alone would repeat it every second.
            if not self._unheard and not isinstance(error, BlockingIOError | TimeoutError):
                log.warning(
                    "the supervisor does not listen (%s): until it does, a crash of this daemon"
                    " loses the weights; wcache up starts one that takes over",
                    error.strerror or error,
                )
                self._unheard = True
            return False
        if self._unheard:
            log.info("the supervisor listens again")
            self._unheard = False
        return True
