"""The instance's configuration as the daemon sees it: the file, or the last good one."""

import logging
import os
from pathlib import Path

import msgspec

from wcache.config import MAX_CONFIG_BYTES, AccessSection, Config, load_config
from wcache.errors import ConfigError, ProtocolError
from wcache.fingerprint import Fingerprint, wanted_by
from wcache.memory.memfd import create_sealed, read_sealed

log = logging.getLogger(__name__)

STORED_NAME = "config"


class _StoredAccess(msgspec.Struct, frozen=True):
    """Of a stored configuration what is needed also where another wcache has more keys."""

    access: AccessSection = AccessSection()


class Configuration:
    """Reads the file again when it changed; a file that can not be used changes nothing.

    The last good configuration is kept beside the weights in the supervisor's store, so that a
    daemon restarted over a broken file still knows who may attach and what its weights are for.
    """

    def __init__(self, path: Path, stored_fd: int | None) -> None:
        """Takes ownership of ``stored_fd``, the descriptor kept under :data:`STORED_NAME`."""
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self.current: Config | None = None
        self.problems: tuple[str, ...] = ()
        self.stored_fd: int | None = stored_fd
        self._stored_access = AccessSection()
        if stored_fd is not None:
            self.current, self._stored_access = _read_stored(stored_fd)
        self.stored: Config | None = self.current
        """What the daemon before this one went by, whatever the file says since."""
        self.refresh()

    def refresh(self) -> bool:
        """Reads the file if it is not the one read last; True when ``current`` changed."""
        seen = self._stat()
        if seen is not None and seen == self._seen:
            return False
        self._seen = seen
        try:
            config = load_config(self._path)
        except ConfigError as error:
            self.problems = error.problems or (error.message,)
            return False
        self.problems = ()
        changed = config != self.current
        self.current = config
        return changed

    @property
    def access(self) -> AccessSection:
        """Who may attach, which engines rely on also where all else can not be read."""
        return self.current.access if self.current else self._stored_access

    def wanted(self, rank: int) -> Fingerprint | None:
        """What weights of ``rank`` must be; None where nothing is known of it."""
        if self.current is None or not 0 <= rank < self.current.ranks.world_size:
            return None
        return wanted_by(self.current, rank)

    def missing(self, rank: int) -> str:
        """Says that there is no such rank; empty when there is, or no configuration."""
        if self.current is None or rank in range(self.current.ranks.world_size):
            return ""
        count = self.current.ranks.world_size
        return f"the configuration has {count} ranks, and none with number {rank}"

    def check(self, rank: int) -> None:
        """Raises :class:`ConfigError` where there is nothing to go by, or no such rank."""
        if self.current is None:
            raise ConfigError(self.problems[0], problems=self.problems)
        if missing := self.missing(rank):
            raise ConfigError(missing)

    def make_stored(self) -> int:
        """A new descriptor of the current configuration, to be stored in place of the old one."""
        if self.stored_fd is not None:
            os.close(self.stored_fd)
        self.stored_fd = create_sealed("wcache-config", msgspec.json.encode(self.current))
        return self.stored_fd

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def _read_stored(fd: int) -> tuple[Config | None, AccessSection]:
    try:
        data = read_sealed(fd, MAX_CONFIG_BYTES)
        try:
            config = msgspec.json.decode(data, type=Config)
        except msgspec.ValidationError as error:  # perhaps of another wcache
            log.warning("the stored configuration can not be read: %s", error)
            return None, msgspec.json.decode(data, type=_StoredAccess).access
    except (ProtocolError, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("the stored configuration can not be read: %s", error)
        return None, AccessSection()
    return config, config.access
