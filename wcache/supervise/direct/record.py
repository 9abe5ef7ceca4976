"""Which ranks were started, on disk, so that a supervisor after this one finds their daemons."""

import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec

from wcache.config import write_file
from wcache.supervise.direct.messages import Ranks

log = logging.getLogger(__name__)

RECORD_NAME = "ranks.json"
_MAX_BYTES = 1 << 16


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    ranks: Ranks = ()


def load_ranks(path: Path) -> tuple[int, ...]:
    """The recorded ranks; none when the file is absent or can not be read, which is logged."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES)
        return tuple(sorted(set(msgspec.json.decode(data, type=RankRecord).ranks)))
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.error("record of started ranks can not be read: %s: %s", path, error)
        return ()


def save_ranks(path: Path, ranks: Iterable[int]) -> None:
    """Raises ``OSError``."""
    record = RankRecord(ranks=tuple(sorted(ranks)))
    write_file(path, msgspec.json.encode(record) + b"\n", mode=0o600)
