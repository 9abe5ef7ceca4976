"""Bytes, descriptors and credentials over a Unix socket, for both of its ends."""

import array
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from wcache.errors import ProtocolError
from wcache.protocol.messages import MAX_FDS_PER_FRAME

RECEIVE_BYTES = 1 << 16
_INT_BYTES = array.array("i").itemsize
# linux/socket.h; Python's socket module does not name it.
_SO_PEERGROUPS = 59
# All that Python's getsockopt takes: 256 groups.
_MAX_OPTION_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who is at the other end, as the kernel saw it at connect(2)."""

    pid: int
    """0 when the peer lives in a pid namespace that this one can not see."""
    uid: int
    gid: int
    groups: tuple[int, ...]


def peer_credentials(connection: socket.socket) -> Credentials:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    pid, uid, gid = struct.unpack("iII", raw)
    try:
        groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_OPTION_BYTES)
    except OSError:  # before Linux 4.13, or a peer in more groups than that
        groups = b""
    return Credentials(pid, uid, gid, struct.unpack(f"{len(groups) // 4}I", groups))


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One recvmsg(2): up to 64 KiB and the descriptors that came with them, close-on-exec.

    No bytes mean the end of the stream. Raises :class:`ProtocolError` when descriptors were lost,
    after closing those that did arrive.
    """
    space = socket.CMSG_SPACE(MAX_FDS_PER_FRAME * _INT_BYTES)
    data, ancillary, flags, _ = connection.recvmsg(RECEIVE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(payload[: len(payload) - len(payload) % _INT_BYTES])
            fds += received
    if flags & socket.MSG_CTRUNC:
        close_all(fds)
        raise ProtocolError(
            "descriptors were lost: too many in one message, or too many open here",
            hint="raise this process's limit (ulimit -n, LimitNOFILE=), or memory.slab_bytes for"
            " fewer slabs",
        )
    return data, fds


def send(connection: socket.socket, data: bytes | memoryview, fds: Sequence[int] = ()) -> int:
    """One sendmsg(2); returns how many bytes went, and ``fds`` went with the first of them."""
    if not fds:
        return connection.send(data)
    rights = array.array("i", fds)
    return connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def close_all(fds: Sequence[int]) -> None:
    """Closes every descriptor of ``fds``; one that is closed already is passed over."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            continue
