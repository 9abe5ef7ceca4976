"""Another user for a part of a test, where the test runs as root; else modes alone keep us out."""

import contextlib
import os
from collections.abc import Iterator

NOBODY = 65534


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """Files of mode 0 are closed to this process within.

    The effective user alone changes, of all threads: what is imported lazily must have been before,
    since the interpreter may lie where nobody else can read it.
    """
    if os.geteuid() != 0:
        yield
        return
    groups, gid = os.getgroups(), os.getegid()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(gid)
        os.setgroups(groups)
