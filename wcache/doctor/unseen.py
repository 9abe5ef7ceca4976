"""What this user may not look at: said as such, since nothing else is known of it."""

import os
from pathlib import Path

from wcache.doctor.evidence import Evidence
from wcache.doctor.finding import Finding, warn
from wcache.machine.permissions import as_root, who_may

INSIDE = os.R_OK | os.X_OK


def unseen(evidence: Evidence, check: str, path: Path, access: int = INSIDE) -> Finding:
    """A finding of ``check`` that ``path`` was refused to us; never one that deletes anything."""
    why = who_may(path, access) or "permission denied"
    if why.startswith(f"{path} "):
        return warn(check, f"{why}: it can not be looked at", look_again(evidence))
    return warn(check, f"{path} can not be looked at: {why}", look_again(evidence))


def look_again(evidence: Evidence) -> str:
    """The command that sees more than this one did."""
    if os.geteuid() == 0:
        return "wcache logs --supervisor"
    name = evidence.instance.instance
    return as_root(["doctor", *(["--instance", name] if name else [])])
