"""The survival run itself: weights are loaded, everything happens to them, and is looked at."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
from survival_checkpoint import Checkpoint
from survival_hosts import Engine, Event, Host
from survival_memory import Meter, meter
from survival_table import Row

from tests.systemd.lab import FailedCommand
from wcache.protocol.control import SilentDaemonError
from wcache.protocol.messages import Report
from wcache.ranks import ask
from wcache.state import RankState
from wcache.units import GIB, size

PATIENCE_S = 60.0
LOAD_S = 300.0


class Run:
    """One host, one checkpoint, and what was found."""

    def __init__(self, host: Host, checkpoint: Checkpoint, device: str) -> None:
        self._host = host
        self._checkpoint = checkpoint
        self._device = device
        self._paths = host.paths.rank(0)
        self.rows: list[Row] = []
        self.not_shown: list[str] = []
        self.weight_bytes = 0

    def go(self) -> None:
        memory = meter(self._device, self._host.proc)
        # What has made the checkpoint may have used the GPU a moment ago.
        wait_until(lambda: not memory.processes())
        say(f"{memory.what} in use before: {size(memory.used())}")
        before = memory.used()
        self._up()
        first = self._report()
        assert first.serving
        self.weight_bytes = first.serving.weight_bytes
        memory.note(first.pid)
        self._verify()
        with_engine = Phase(self, self._host.engine(), first)
        try:
            self._checkpoint.move_away()
            self._checkpoint.watch()
            say("the checkpoint is moved away")
            for event in self._host.events():
                with_engine.go_through(event)
        finally:
            with_engine.engine.close()
            self._checkpoint.put_back()
        slabs = first.serving.slab_bytes
        wait_until(lambda: memory.is_back_at(before + slabs) and not memory.processes())
        held = memory.used() - before
        self.claim(held >= slabs and memory.is_back_at(before + slabs),
                   f"{size(slabs)} of slabs and no engine: {size(held)} more in use")  # fmt: skip
        self.claim(not memory.processes(), "no process is shown to hold them")
        self._stop_and_start(with_engine.engine.digest, memory, before)
        self._verify()
        self._host.wcache("down")
        wait_until(lambda: memory.is_back_at(before) and not memory.processes())
        say(f"{memory.what} in use after down: {size(memory.used())}")
        self.claim(memory.is_back_at(before), "wcache down gives the memory back")
        self.claim(not memory.processes(), "and no process is shown")

    def claim(self, holds: bool, what: str) -> None:
        say(f"  {'ok' if holds else 'NOT SHOWN'}: {what}")
        if not holds:
            self.not_shown.append(what)

    def ready(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = msgspec.json.decode(self._paths.ready_file.read_bytes())
        except FileNotFoundError:
            return {}
        return found

    def report(self) -> Report | None:
        """None too while nobody answers."""
        try:
            return ask(self._paths)
        except SilentDaemonError:
            return None

    def read_by(self, pid: int) -> tuple[int, int]:
        """Bytes that a process has read, and those of them that came from disk (proc(5))."""
        lines = (self._host.proc / str(pid) / "io").read_text().splitlines()
        counts = dict(line.split(": ") for line in lines)
        return int(counts["rchar"]), int(counts["read_bytes"])

    def is_there(self, pid: int) -> bool:
        """False too for one that waits to be reaped."""
        try:
            stat = (self._host.proc / str(pid) / "stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] != "Z"

    def stored(self) -> int:
        return self._host.stored()

    @property
    def checkpoint(self) -> Checkpoint:
        return self._checkpoint

    def _up(self) -> None:
        slab = "1GiB" if self._checkpoint.nbytes >= 4 * GIB else "16MiB"
        began = time.perf_counter()
        self._host.wcache("up", "--model", self._host.model, "--tp", "1", "--device", self._device,
                          "--slab-bytes", slab)  # fmt: skip
        say(f"wcache up: {size(self._checkpoint.nbytes)} in {time.perf_counter() - began:.1f} s")

    def _verify(self) -> None:
        for line in self._host.wcache("verify").stdout.splitlines():
            say(f"  {line}")

    def _report(self) -> Report:
        found = self.report()
        if found is None or found.serving is None:
            raise FailedCommand("no daemon serves")
        return found

    def _stop_and_start(self, digest: str, memory: Meter, before: int) -> None:
        """Not an event that weights outlive, before systemd 254: they are freed and loaded."""
        say("stop, then start, with the checkpoint back in its place")
        kept = self._host.keeps_over_stop()
        self._checkpoint.watch()
        self._host.stop()
        if not kept:
            wait_until(lambda: memory.is_back_at(before))
            self.claim(memory.is_back_at(before), "a stop frees the weights")
        read = 0
        began = time.perf_counter()
        starting = Deed(self._host.start)
        while not self.ready():
            starting.check()
            if time.perf_counter() - began > LOAD_S:
                raise FailedCommand("it was not loaded again in time")
            found = self.report()
            if found and found.progress:
                read = max(read, self._read_by_loader(found.progress.loader_pid))
            time.sleep(0.002)
        taken = time.perf_counter() - began
        starting.wait()
        found = self._report()
        assert found.serving
        memory.note(found.pid)
        engine = self._host.engine()
        try:
            same = engine.digest == digest
            lease = str(engine.say()["lease"])
        finally:
            engine.close()
        self.claim(found.serving.how == ("adopted" if kept else "loaded"),
                   f"after stop and start the weights are {found.serving.how}")  # fmt: skip
        opened = self._checkpoint.opened
        self.claim((opened == 0) == kept, f"its checkpoint's files were used {opened} times")
        self.claim(same, "they are the same bytes")
        by_daemon, from_disk = self.read_by(found.pid)
        row = Row(event="stop, then start", ready_ms=taken * 1e3, checkpoint_bytes=read)
        row.read_bytes, row.disk_bytes = by_daemon, from_disk
        row.same_digest, row.lease = same, f"new, {lease}"
        self.rows.append(row)

    def _read_by_loader(self, pid: int) -> int:
        try:
            return self.read_by(pid)[0]
        except (OSError, KeyError, ValueError):  # it has just ended
            return 0


class Phase:
    """The engine that is attached all along, and the daemons that come and go meanwhile."""

    def __init__(self, run: Run, engine: Engine, first: Report) -> None:
        assert first.serving
        self._run = run
        self.engine = engine
        self._digest = first.serving.manifest_digest
        self._generation = first.serving.number

    def go_through(self, event: Event) -> None:
        """Makes it happen, waits for a daemon that is ready, and looks at everything."""
        run = self._run
        say(event.name)
        old = int(run.ready()["pid"])
        read_before = run.read_by(old)
        looks_before = int(self.engine.say()["looks"])
        ready_s, gap_s = self._await(event, old)
        row = Row(event=event.name, ready_ms=ready_s * 1e3,
                  gap_ms=None if gap_s is None else gap_s * 1e3)  # fmt: skip
        run.rows.append(row)

        def is_settled() -> bool:
            now = run.report()
            return (
                now is not None
                and now.state is RankState.READY
                and [lease.pid for lease in now.leases] == [self.engine.pid]
                and self.engine.say()["lease"] == "held"
                and run.stored() == now.expected_fds
                and int(self.engine.say()["looks"]) > looks_before + 1
            )

        wait_until(is_settled)
        self._judge(event, old, row, read_before, looks_before)

    def _await(self, event: Event, old: int) -> tuple[float, float | None]:
        """Seconds until a daemon is ready, and for how many of them there was none."""
        run = self._run
        gone: float | None = None
        event.prepare()
        began = time.perf_counter()
        acting = Deed(event.act)
        while True:
            if gone is None and not run.is_there(old):
                gone = time.perf_counter()
            is_done = acting.check()
            facts = run.ready()
            if is_done if not event.other_daemon else facts and facts["pid"] != old:
                break
            if time.perf_counter() - began > PATIENCE_S:
                raise FailedCommand(f"no daemon is ready {PATIENCE_S:g} s after {event.name}")
            time.sleep(0.001)
        now = time.perf_counter()
        acting.wait()
        return now - began, None if gone is None else now - gone

    def _judge(
        self, event: Event, old: int, row: Row, read_before: tuple[int, int], looks_before: int
    ) -> None:
        run = self._run
        now = run.report()
        if now is None or now.serving is None:
            run.claim(False, f"{event.name}: a daemon serves")
            return
        stored, seen = run.stored(), self.engine.say()
        read = run.read_by(now.pid)
        if not event.other_daemon:
            read = (read[0] - read_before[0], read[1] - read_before[1])
        row.read_bytes, row.disk_bytes = read
        row.same_digest = now.serving.manifest_digest == self._digest and not seen["changed"]
        opened = run.checkpoint.opened
        # Nobody can have read of files that nobody has opened.
        row.checkpoint_bytes = 0 if not opened else None
        row.looks = int(seen["looks"]) - looks_before
        held = [lease.pid for lease in now.leases] == [self.engine.pid]
        row.lease = "lost" if not held else "renewed" if event.other_daemon else "kept"
        claims = {
            "the rank is ready": now.state is RankState.READY,
            "another daemon serves": (now.pid != old) == event.other_daemon,
            "it has adopted them": not event.other_daemon or now.serving.how == "adopted",
            "the generation and the manifest are the same": row.same_digest
            and now.serving.number == self._generation,
            f"{stored} descriptors are kept": stored == now.expected_fds > now.serving.slabs,
            f"{opened} uses of the checkpoint's files": opened == 0,
            f"{size(read[0])} read by the daemon": read[0] < run.checkpoint.nbytes,
            f"the engine read all weights {row.looks} times, unchanged": row.looks > 0
            and not seen["changed"],
            f"its lease is {row.lease}": held and seen["lease"] == "held",
        }
        if not event.other_daemon:
            del claims["another daemon serves"], claims["it has adopted them"]
            claims["the same daemon serves"] = now.pid == old
        say(f"  ok: {'; '.join(what for what, holds in claims.items() if holds)}")
        for what in (what for what, holds in claims.items() if not holds):
            run.claim(False, f"{event.name}: {what}")


class Deed(threading.Thread):
    """Something that goes on beside the look at it, and keeps nobody from ending before it does."""

    def __init__(self, do: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._do = do
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._do()
        except Exception as error:  # noqa: BLE001  # it is raised again where it was asked for
            self._error = error

    def check(self) -> bool:
        """True when it is done; raises what it has ended with."""
        if self.is_alive():
            return False
        if self._error:
            raise self._error
        return True

    def wait(self) -> None:
        self.join(PATIENCE_S)
        if not self.check():
            raise FailedCommand(f"it does not end within {PATIENCE_S:g} s")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Returns when it holds, or when it is too late: what is claimed afterwards tells."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
