"""What other processes of this machine are doing, as far as psutil can tell."""

import contextlib
import os

import psutil


def listens(root: int, port: int) -> bool | None:
    """Whether ``root``, a process of its group or a descendant listens on a TCP ``port``.

    None where one of them may not be looked at and no other one listens.
    """
    denied = False
    for pid in _family(root):
        try:
            found = psutil.Process(pid).net_connections("tcp")
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            denied = True
            continue
        if any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in found):
            return True
    return None if denied else False


def _family(root: int) -> set[int]:
    """Of a descendant whose parent has ended only the group tells, of another group the parent."""
    family = {root}
    with contextlib.suppress(psutil.NoSuchProcess):
        family.update(child.pid for child in psutil.Process(root).children(recursive=True))
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == root:
                family.add(pid)
    return family
