"""The files that tell other programs that a rank is ready."""

import contextlib
import logging
import os

import msgspec

from wcache.config import write_file
from wcache.paths import RankPaths
from wcache.protocol.reports import GenerationReport, How

log = logging.getLogger(__name__)


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


class Announcement:
    """The two files of one rank; a full disk below them must not end who holds weights."""

    def __init__(self, paths: RankPaths) -> None:
        self._paths = paths
        self._told: int | None = None
        """The generation that this daemon has written them for."""
        self.problem = ""
        """Why they do not say what is true; empty when they do."""

    def make(self, serving: GenerationReport) -> None:
        """Writes both; what keeps them from it is logged once, and is :attr:`problem`."""
        problem = ""
        try:
            announce(self._paths, serving)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            problem = f"{self._paths.ready_file} can not be written: {why}"
            if self._told != serving.number:
                # What lies there is of a daemon or a generation before.
                with contextlib.suppress(OSError):
                    withdraw(self._paths)
        else:
            self._told = serving.number
        if problem and problem != self.problem:
            log.error("%s", problem)
        elif self.problem and not problem:
            log.info("%s is written", self._paths.ready_file)
        self.problem = problem

    def withdraw(self) -> None:
        """Removes both: there is nothing to say any more."""
        withdraw(self._paths)
        self.problem, self._told = "", None


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
