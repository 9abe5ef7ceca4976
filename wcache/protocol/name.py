"""A process's name in the kernel, by which it is found also when its files were removed.

It is an abstract Unix socket (unix(7)), so it ends with the process and nothing can be removed from
under it. Nobody is told anything over it: whoever connects learns the listener's pid.
"""

import contextlib
import hashlib
import os
import socket
from pathlib import Path

from wcache.paths import InstancePaths, RankPaths
from wcache.protocol.wire import peer_credentials

_BACKLOG = 128
_CONNECT_TIMEOUT_S = 1.0

Named = InstancePaths | RankPaths
"""A supervisor is named by the paths of its instance, a daemon by those of its rank."""


class Name:
    """Makes this process the only one of that name until :meth:`close` or its end."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener

    def fileno(self) -> int:
        """Can be read when somebody has looked the name up."""
        return self._listener.fileno()

    def hang_up(self) -> None:
        """Lets go of who looked the name up: the kernel has told all that there is to know."""
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()

    def close(self) -> None:
        self._listener.close()


def address(paths: Named) -> str:
    """The same for every user.

    Containers may share the names of their host's network, but not what lies at the same path: so
    the mount namespace is part of it.
    """
    if isinstance(paths, InstancePaths):
        kind, run, name = "supervisor", paths.run, paths.instance
    else:
        kind, run, name = "daemon", paths.folder.parent, str(paths.id)
    run = run.absolute()
    folder = str(run.parent.resolve() / run.name)
    where = (str(Path("/proc/self/ns/mnt").readlink()), folder, name)
    digest = hashlib.sha256(os.fsencode("\0".join(where))).hexdigest()
    return f"\0wcache-{kind}-{digest[:32]}"


def take(paths: Named) -> Name | None:
    """None when somebody has it."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        made.bind(address(paths))
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        return None
    return Name(made)


def keeper(paths: Named) -> int | None:
    """The pid of the supervisor or daemon of ``paths``, also where nothing is left of its folder.

    None when there is none, or only somebody who is neither root nor this process's user; 0 when
    it can not be told from here.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(address(paths))
            owner = peer_credentials(probe)
        except (BlockingIOError, TimeoutError):
            return 0  # its queue is full: it does not run
        except OSError:
            return None
    return owner.pid if owner.uid in (0, os.geteuid()) else None


def is_stopped(pid: int) -> bool:
    """True for a process that SIGSTOP or a debugger has halted."""
    try:
        # The state follows the name, which may have parentheses of its own (proc_pid_stat(5)).
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in "Tt"
