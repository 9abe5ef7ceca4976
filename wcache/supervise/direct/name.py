"""A supervisor's name in the kernel, which stays when its run folder is removed.

It is an abstract Unix socket (unix(7)), so it ends with the supervisor and no file can be removed
from under it. Nobody is told anything over it: whoever connects learns the listener's pid.
"""

import hashlib
import os
import socket
from pathlib import Path

from wcache.paths import InstancePaths
from wcache.protocol.wire import peer_credentials

_BACKLOG = 128
_CONNECT_TIMEOUT_S = 1.0


def address(paths: InstancePaths) -> str:
    """The name of the supervisor of ``paths``, the same for every user.

    Containers may share the names of their host's network, but not what lies at the same path: so
    the mount namespace is part of it.
    """
    run = paths.run.absolute()
    folder = str(run.parent.resolve() / run.name)
    where = (str(Path("/proc/self/ns/mnt").readlink()), folder, paths.instance)
    digest = hashlib.sha256(os.fsencode("\0".join(where))).hexdigest()
    return f"\0wcache-supervisor-{digest[:32]}"


def take(paths: InstancePaths) -> socket.socket | None:
    """The listening socket that makes this process the supervisor; None when it is taken."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        made.bind(address(paths))
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        return None
    return made


def keeper(paths: InstancePaths) -> int | None:
    """The pid of the supervisor of ``paths``, also where nothing is left of its run folder.

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
