"""Writing a configuration on an operator's behalf."""

from pathlib import Path

from wcache.config import Config, save_config
from wcache.errors import NoPermissionError, WcacheError


def write_config(config: Config, path: Path) -> None:
    """Saves ``config``; raises :class:`WcacheError` for whatever keeps it from being written."""
    try:
        save_config(config, path)
    except PermissionError:
        raise NoPermissionError(
            f"no permission to write {path}", hint="use sudo, or set WCACHE_CONFIG_DIR"
        ) from None
    except OSError as error:
        raise WcacheError(
            f"{path} can not be written: {(error.strerror or str(error)).lower()}",
            hint="with room there, or with the file system writable, the same command goes on",
        ) from None
