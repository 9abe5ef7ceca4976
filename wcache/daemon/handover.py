"""Descriptors that the supervisor kept, and the names under which it keeps them."""

import logging
import os
import re
import stat

from wcache.protocol.wire import close_all

log = logging.getLogger(__name__)

FIRST_FD = 3
MAX_HANDED_OVER = 65536

_SLAB = re.compile(r"g([1-9][0-9]{0,8})\.slab\.(0|[1-9][0-9]{0,4})")
_MANIFEST = re.compile(r"g([1-9][0-9]{0,8})\.manifest")


def slab_name(generation: int, index: int) -> str:
    return f"g{generation}.slab.{index}"


def manifest_name(generation: int) -> str:
    """The manifest is stored last: a generation is whole when its manifest is there."""
    return f"g{generation}.manifest"


def parse_slab_name(name: str) -> tuple[int, int] | None:
    """(generation, index), or None for any other name."""
    match = _SLAB.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def parse_manifest_name(name: str) -> int | None:
    match = _MANIFEST.fullmatch(name)
    return int(match[1]) if match else None


def generation_of(name: str) -> int | None:
    """The generation that a descriptor is a part of, or None for any other name."""
    slab = parse_slab_name(name)
    return slab[0] if slab is not None else parse_manifest_name(name)


def take_over() -> dict[str, int]:
    """Descriptors by name, close-on-exec; empty when nothing was handed to this process.

    systemd hands them over in no order that can be relied on (252: last stored first), so they
    are known by name only. The variables are taken out of the environment (sd_listen_fds(3)).
    """
    pid = os.environ.pop("LISTEN_PID", "")
    count = os.environ.pop("LISTEN_FDS", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count.isdigit() or int(count) > MAX_HANDED_OVER:
        return {}
    handed_over: dict[str, int] = {}
    doubtful: set[str] = set()
    for index in range(int(count)):
        fd = FIRST_FD + index
        name = names[index] if index < len(names) else "unknown"
        try:
            os.set_inheritable(fd, False)
        except OSError as error:
            log.error("descriptor %d (%s) was announced and is not there: %s", fd, name, error)
            continue
        if name in handed_over:
            if generation_of(name) is not None and _are_other_files(fd, handed_over[name]):
                doubtful.add(name)
            log.warning("descriptor %s was handed over twice, the second is closed", name)
            close_all([fd])
        else:
            handed_over[name] = fd
    for name in doubtful:
        log.error("descriptor %s was handed over with two contents, neither is used", name)
        close_all([handed_over[name]])
        # Is no part of anything: its generation is not whole, and all of it is dropped.
        handed_over[name] = os.memfd_create("wcache-doubtful", os.MFD_CLOEXEC)
    return handed_over


def _are_other_files(one: int, other: int) -> bool:
    """True for two memfds of which nobody knows which one a generation is made of.

    A GPU's allocations can not be told apart: each shows the same node.
    """
    first, second = os.fstat(one), os.fstat(other)
    return stat.S_ISREG(first.st_mode) and not os.path.samestat(first, second)
