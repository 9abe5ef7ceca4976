"""Log lines on stderr: with a level prefix for the journal, with time and level for a file."""

import logging
import os
import sys

from wcache.paths import RankId

# sd-daemon(3): the journal takes the level from <N> at the start of a line.
_JOURNAL_LEVELS = {
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: 3,
    logging.CRITICAL: 2,
}


LEVEL_VARIABLE = "WCACHE_LOG_LEVEL"


class JournalFormatter(logging.Formatter):
    """``<N>`` in front of every line, of a traceback's too."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{_JOURNAL_LEVELS.get(record.levelno, 6)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines())


def setup_logging(part: str, rank: RankId | str) -> None:
    """Logs to stderr from here on; ``part`` and ``rank`` tell a reader who speaks."""
    handler = logging.StreamHandler(sys.stderr)
    if _stderr_is_journal():
        handler.setFormatter(JournalFormatter("%(message)s"))
    else:
        line = f"%(asctime)s %(levelname)s {part}[{rank}]: %(message)s"
        handler.setFormatter(logging.Formatter(line))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    wanted = os.environ.get(LEVEL_VARIABLE) or "INFO"
    level = logging.getLevelNamesMapping().get(wanted.upper())
    root.setLevel(logging.INFO if level is None else level)
    if level is None:
        # Who holds weights must not fail to start for it.
        root.warning("%s=%r is no level, INFO is taken", LEVEL_VARIABLE, wanted[:40])


def _stderr_is_journal() -> bool:
    """True when stderr is the stream that systemd says it connected to the journal."""
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
