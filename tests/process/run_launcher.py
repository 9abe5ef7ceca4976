"""Runs the fake engine as ``wcache run`` runs a real one, and prints each record as JSON.

usage: run_launcher.py PORT READY_TIMEOUT_S [FLAG...]; exits as ``wcache run`` does.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from wcache.config import Loader
from wcache.engines.interface import Engine, Launch, Mark, Probe, Sign, Wish
from wcache.engines.orders import Orders
from wcache.errors import WcacheError
from wcache.notify import Notifier
from wcache.run.session import Listeners, Plan, run
from wcache.run.timeline import Record

SCRIPT = Path(__file__).parent / "fake_engine.py"


class FakeEngine:
    name = "fake"
    runs_ranks_in_order = False
    marks = (
        Mark("imports", re.compile("imports are done")),
        Mark("capture", re.compile("capture took")),
    )

    def recognises(self, argv: Sequence[str]) -> bool:
        return bool(argv)

    def wish(self, argv: Sequence[str]) -> Wish:
        return Wish(model=argv[0])

    def loaders(self, wish: Wish) -> Sequence[Loader]:
        del wish
        return ("publish",)

    def launch(self, argv: Sequence[str], orders: Orders) -> Launch:
        return Launch(argv=tuple(argv), environment=orders.environment())

    def probe(self, argv: Sequence[str]) -> Probe | Sign:
        if "sign" in argv:
            return Sign("capture")
        return Probe(host="", port=int(argv[2]), path="/v1/completions", body={"max_tokens": 1})


def main() -> int:
    port, timeout, *flags = sys.argv[1:]
    engine: Engine = FakeEngine()
    command = (sys.executable, str(SCRIPT), port, *flags)

    def told(kind: str, record: Record) -> None:
        print(kind, msgspec.json.encode(record).decode(), flush=True)

    plan = Plan(
        engine=engine,
        command=command,
        launch=engine.launch(command, Orders()),
        probe=engine.probe(command),
        instance="",
        mode="client",
        ready_timeout_s=float(timeout),
    )
    listeners = Listeners(
        ready=lambda record: told("READY", record), ended=lambda record: told("ENDED", record)
    )
    try:
        return run(plan, Notifier.from_environment(), listeners)
    except WcacheError as error:
        print(f"error: {error.message}", flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
