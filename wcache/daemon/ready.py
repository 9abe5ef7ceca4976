"""The files that tell other programs that a rank is ready."""

import os

import msgspec

from wcache.config import write_file
from wcache.paths import RankPaths
from wcache.reports import GenerationReport, How


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """``rank.ready``: there only while it is true."""

    pid: int
    invocation_id: str
    """systemd's INVOCATION_ID of the daemon's unit; empty without one."""
    generation: int
    fingerprint_digest: str
    bytes: int
    tensors: int
    how: How
    since: float


def announce(paths: RankPaths, serving: GenerationReport) -> None:
    """Writes ``fingerprint.json`` and then ``rank.ready``, each whole or not at all."""
    ready = Ready(
        pid=os.getpid(),
        invocation_id=os.environ.get("INVOCATION_ID", ""),
        generation=serving.number,
        fingerprint_digest=serving.fingerprint_digest,
        bytes=serving.weight_bytes,
        tensors=serving.tensors,
        how=serving.how,
        since=serving.since,
    )
    for path, content in ((paths.fingerprint_file, serving.fingerprint), (paths.ready_file, ready)):
        text = msgspec.json.format(msgspec.json.encode(content), indent=2)
        write_file(path, text + b"\n", mode=0o644)


def withdraw(paths: RankPaths) -> None:
    """Removes both files; a reader that has one open keeps what it read."""
    paths.ready_file.unlink(missing_ok=True)
    paths.fingerprint_file.unlink(missing_ok=True)
