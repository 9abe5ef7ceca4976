"""What a rank served last, in a file beside its socket: what its next daemon may take back."""

import errno
import os
import select
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from wcache.config import write_file
from wcache.errors import WcacheError
from wcache.fingerprint import Fingerprint, compare

VERSION = 1
MAX_BYTES = 1 << 20
# Only whether any of them still lives is asked, so a few of many tell enough.
MAX_LEASES = 64


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """``served.json``: the generation that a daemon served, also after that daemon's end.

    It lies in the run folder because that is as long-lived as the memory: a boot empties both, and
    a container that is replaced leaves it behind. It holds no memory and brings nothing back by
    itself: a live engine must offer exactly this generation, and the configuration must want it.
    """

    version: int = VERSION
    generation: Annotated[int, msgspec.Meta(ge=1, le=999_999_999)]
    manifest_digest: str
    fingerprint: Fingerprint
    leases: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_LEASES)] = ()
    """Pids of the engines that held leases; 0 for one that the daemon could not see."""

    def may_come_back(self, wanted: Fingerprint | None) -> bool:
        """True when an engine that may still live has mapped what ``wanted`` asks for."""
        if wanted is None or compare(self.fingerprint, wanted):
            return False
        return any(may_live(pid) for pid in self.leases)


def read_served(path: Path) -> Served | None:
    """None when there is no such file.

    Raises :class:`WcacheError` for one that can not be believed: its digest decides what is
    taken for weights, so only root or this process's own user may have written it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WcacheError(f"{path} can not be read: {(error.strerror or '').lower()}") from None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()):
            raise WcacheError(f"{path} is not a file of root's or of this user's")
        data = file.read(MAX_BYTES + 1)
    try:
        found = msgspec.json.decode(data[:MAX_BYTES], type=Served)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WcacheError(f"{path} can not be read: {error}") from None
    if found.version != VERSION:
        raise WcacheError(f"{path} has version {found.version}, this wcache reads {VERSION}")
    return found


def write_served(path: Path, served: Served) -> None:
    """Whole or not at all; raises ``OSError``.

    Not synced: no memory outlives a power cut, and the daemon must not wait for a disk.
    """
    data = msgspec.json.encode(served) + b"\n"
    if len(data) > MAX_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    write_file(path, data, mode=0o644, sync=False)


def some_of(pids: Iterable[int]) -> tuple[int, ...]:
    """``pids`` as a record keeps them."""
    return tuple(sorted(set(pids))[:MAX_LEASES])


def may_live(pid: int) -> bool:
    """False only for a process that has certainly ended; 0 is one that can not be seen."""
    if pid <= 0:
        return True
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:  # before Linux 5.3, or not allowed here
        return True
    try:
        # Readable once it has ended, also before its parent has asked how.
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return not poll.poll(0)
    finally:
        os.close(fd)
