"""A real ``vllm serve`` under ``wcache run``: started, asked, ended."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from tests.places import Places
from wcache.run.timeline import Record, load

PROMPTS = (
    "The capital of France is", "Once upon a time", "def fibonacci(n):",
    "The three primary colors are", "Water boils at", "In 1969, the first man",
    "My favourite book is", "To make bread you need",
)  # fmt: skip
READY_S = 240.0
_TOKENS = 24


def environment(places: Places) -> dict[str, str]:
    """For commands and engines alike: folders of the test's own, and no network."""
    bin_folder = str(Path(sys.executable).parent)
    return {
        **os.environ,
        **places.environment,
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(places.root / "vllm"),
    }


def wcache(places: Places, *arguments: str) -> str:
    """Runs a command of wcache's to its end; returns its stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "wcache", *arguments],
        env=environment(places), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def until(condition: Callable[[], bool], what: str, timeout_s: float = READY_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


class Server:
    """One run of ``vllm serve``; use as a context, which ends it."""

    def __init__(self, places: Places, model: Path, *options: str) -> None:
        """``options`` are those of ``wcache run``."""
        self.port = _free_port()
        self._places = places
        self._model = model
        self.command = (
            "vllm", "serve", str(model), "--host", "127.0.0.1", "--port", str(self.port),
            "--served-model-name", "m", "--enforce-eager", "--max-model-len", "512",
            "--dtype", "bfloat16",
        )  # fmt: skip
        self.log = places.root / f"serve-{self.port}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "wcache", "run", *options, "--", *self.command],
                env=environment(places), stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def record(self) -> Record | None:
        """What ``wcache run`` has written down so far."""
        folder = self._places.instance().runs_folder
        found = [load(path) for path in folder.glob(f"[0-9]*-{self.process.pid}.json")]
        return found[0] if found else None

    def ready(self) -> Record:
        """Waits for the first token."""
        until(lambda: self.process.poll() is not None or self._is_ready(), "a first token")
        record = self.record
        assert record is not None, self.tail()
        assert record.ready_s is not None, self.tail()
        return record

    def ended(self) -> Record:
        """Waits for an end that the engine takes by itself; its record."""
        until(lambda: self.process.poll() is not None, "the engine's end")
        record = self.record
        assert record is not None, self.tail()
        return record

    def answers(self, prompts: Sequence[str] = PROMPTS) -> list[tuple[int, ...]]:
        """The tokens of one greedy completion for each of ``prompts``."""
        body = {
            "model": "m", "prompt": list(prompts), "max_tokens": _TOKENS, "temperature": 0,
            "return_token_ids": True,
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        assert answer.status == 200, data.decode() + self.tail()
        choices = sorted(json.loads(data)["choices"], key=lambda choice: int(choice["index"]))
        assert len(choices) == len(prompts)
        return [tuple(choice["token_ids"]) for choice in choices]

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def close(self) -> None:
        """Asks it to end, and sees to it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _is_ready(self) -> bool:
        record = self.record
        return record is not None and record.ready_s is not None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
