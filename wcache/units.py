"""Sizes, rates and times as people read them. Pure."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def size(nbytes: int) -> str:
    """``3.1 GiB``, ``120.0 MiB``, ``12 KiB`` or ``17 B``."""
    if nbytes >= GIB:
        return f"{nbytes / GIB:.1f} GiB"
    if nbytes >= MIB:
        return f"{nbytes / MIB:.1f} MiB"
    return f"{nbytes // KIB} KiB" if nbytes >= KIB else f"{nbytes} B"


def duration(seconds: float) -> str:
    """``0.8 s``, ``42 s``, ``3 min``, ``5 h`` or ``2 d``: one unit, for tables."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172800 else f"{seconds / 86400:.0f} d"
