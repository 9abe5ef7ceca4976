"""``python -m wcache.daemon RANK``: keeps one rank's weights and serves them."""

import gc
import logging
import os
import signal
import sys
import time
from types import FrameType

from wcache.daemon import ready
from wcache.daemon.configuration import STORED_NAME, Configuration
from wcache.daemon.handover import take_over
from wcache.daemon.rank import Rank
from wcache.daemon.server import Server
from wcache.errors import ExitCode, TryAgainError, WcacheError
from wcache.log import setup_logging
from wcache.machine import open_files
from wcache.notify import Notifier
from wcache.paths import InstancePaths, RankId, RankPaths
from wcache.protocol import name

log = logging.getLogger("wcache.daemon")

STEP_S = 1.0
# Asked for anew every second of a load, so that a load that hangs is noticed by its start timeout.
EXTENSION_S = 60.0


class Signals:
    """Flags that the handlers set; the loop looks at them when the wake-up pipe says so."""

    def __init__(self) -> None:
        self.stop = False
        self.reload = False
        self.wakeup, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, self._reload)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stop = True

    def _reload(self, _number: int, _frame: FrameType | None) -> None:
        self.reload = True


def main(arguments: list[str]) -> int:
    rank_id = RankId.parse(arguments[0] if len(arguments) == 1 else "")
    setup_logging("daemon", rank_id)
    open_files.raise_limit()
    signals = Signals()
    notifier = Notifier.from_environment()
    handed_over = take_over()
    instance = InstancePaths.of(rank_id.instance)
    configuration = Configuration(instance.config_file, handed_over.pop(STORED_NAME, None))
    paths = instance.rank(rank_id.rank)
    own_name = _take_name(paths)
    rank = Rank(paths, notifier, configuration)
    rank.adopt(handed_over)
    server = Server(paths, rank)
    server.wake_by(signals.wakeup)
    if own_name is not None:
        server.answer_for(own_name)
    try:
        rank.begin()
        # What start left behind is garbage once; the loop makes none that needs a collector.
        gc.collect()
        _serve(server, rank, paths, notifier, signals)
    finally:
        notifier.say("STOPPING=1")
        rank.record()  # before the leases end with their connections
        server.close()
        ready.withdraw(paths)
    return ExitCode.CONFIGURATION if rank.failed else ExitCode.DONE


def _take_name(paths: RankPaths) -> name.Name | None:
    """Raises :class:`TryAgainError` where another daemon has it, perhaps without a socket."""
    taken = name.take(paths)
    if taken is None and (pid := name.keeper(paths)) is not None:
        raise TryAgainError(f"another daemon (pid {pid}) keeps rank {paths.id}")
    return taken


def _serve(
    server: Server, rank: Rank, paths: RankPaths, notifier: Notifier, signals: Signals
) -> None:
    """One loop: serve, ping the watchdog, free what is drained, say how it goes."""
    step_s = min(STEP_S, notifier.watchdog_s / 4) if notifier.watchdog_s else STEP_S
    housekeeping = 0.0
    while not signals.stop and not rank.failed:
        server.step(step_s)
        now = time.monotonic()
        if signals.reload:
            signals.reload = False
            housekeeping = 0.0
        if now - housekeeping >= step_s:
            housekeeping = now
            notifier.mention("WATCHDOG=1")
            # A cleaner of /tmp may have taken either of them, or a full disk have no room for one.
            is_lost = rank.announcement.problem or not paths.ready_file.exists()
            if server.restore() or is_lost:
                rank.announce()
            rank.refresh_configuration()
            server.apply_access(rank.access)
            rank.extend_start(EXTENSION_S)
            rank.store_what_is_not()
            rank.free_drained()
            rank.record()
            rank.say_status()


def run() -> int:
    """Exit codes as everywhere; a bug is a traceback, and its supervisor starts the daemon anew."""
    try:
        return main(sys.argv[1:])
    except WcacheError as error:
        for line in getattr(error, "problems", ()) or (error.message,):
            log.error("%s", line)
        if error.hint:
            log.error("hint: %s", error.hint)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(run())
