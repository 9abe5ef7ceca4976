"""The file of a Unix socket, as long as it is the one that was bound."""

from pathlib import Path


class SocketFile:
    """What lies at ``path`` right after bind(2) or rename(2). Raises ``OSError`` if nothing does.

    The bound socket keeps the inode, so its number is not another file's before that is closed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity = _identity(path)

    @property
    def is_there(self) -> bool:
        """False when somebody has removed or replaced it; then nobody reaches the socket."""
        try:
            return _identity(self._path) == self._identity
        except OSError:
            return False

    def remove(self) -> None:
        """Removes it, unless another has taken its place."""
        if self.is_there:
            self._path.unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino
