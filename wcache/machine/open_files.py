"""How many files this process may have open: a rank of many slabs needs more than a login gives."""

import resource


def raise_limit() -> int:
    """Takes as many as are allowed; returns the soft limit that was in force.

    A login shell gives 1,024. For processes of wcache alone: an engine's limit is its own, and what
    uses select(2) in it must not meet a descriptor beyond 1,023.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft
