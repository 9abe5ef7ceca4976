"""Starts of vLLM that a benchmark times, checks and holds; the parts that those scripts share.

Each start is a process of its own, which tells its times and tokens as lines of JSON; asked for
more on its standard input, it generates again. Run as ``python vllm_starts.py MODEL FORMAT MODE``
by :class:`Starts` alone.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))

if TYPE_CHECKING:
    from wcache.protocol.messages import Report

LOG_LINES = {
    "model loading": r"Model loading took .*? (?:memory )?and ([\d.]+) s",
    "compile": r"torch\.compile (?:took|takes) ([\d.]+) s",
    "capture": r"Graph capturing finished in ([\d.]+) s",
    "engine init": r"init engine \(.*?\) took ([\d.]+) s",
}
START_S = 400
COMMAND_S = 300
PRELOAD_PORT = 18_477


# --- the engine's own process -----------------------------------------------------------------


def engine(model: str, load_format: str, how: str) -> None:
    """One start to the first tokens, told as a line of JSON; again for each line on stdin."""
    began = float(os.environ["BENCH_BEGAN"])
    from vllm import LLM, SamplingParams

    imported = time.time()
    llm = LLM(
        model=model, load_format=load_format, skip_tokenizer_init=True,
        tensor_parallel_size=int(os.environ["BENCH_TP"]),
        enforce_eager=how == "eager", max_model_len=2048, enable_prefix_caching=False,
        gpu_memory_utilization=float(os.environ.get("BENCH_UTILIZATION", "0.45")),
        kv_cache_memory_bytes=int(os.environ.get("BENCH_KV_BYTES", "0")) or None,
    )  # fmt: skip
    ready = time.time()

    def tokens(count: int) -> list[int]:
        wanted = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        prompt: Any = {"prompt_token_ids": list(range(100, 164))}
        return list(llm.generate([prompt], wanted, use_tqdm=False)[0].outputs[0].token_ids)

    first = tokens(16)
    told = {
        "imports": imported - began, "LLM()": ready - imported, "total": time.time() - began,
        "tokens": first,
    }  # fmt: skip
    print("BENCH " + json.dumps(told), flush=True)
    for line in sys.stdin:
        print("BENCH " + json.dumps({"tokens": tokens(int(line))}), flush=True)


# --- what starts it ---------------------------------------------------------------------------


class Starts:
    """Engines of ``tp`` ranks, one row of the table each; files lie below ``work``."""

    def __init__(self, work: Path, tp: int = 1) -> None:
        self.work = work
        self.tp = tp
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self._numbers = itertools.count()
        self._tokens: dict[tuple[Path, str], list[int]] = {}

    def tokens(self, model: Path, how: str) -> list[int]:
        """What a start from disk gave, and every other that runs ``how`` has to give."""
        if (model, how) not in self._tokens:
            self.start("disk, for its tokens", model, "auto", how)
        return self._tokens[model, how]

    def start(
        self, name: str, model: Path, load_format: str, how: str, **environment: str
    ) -> dict[str, Any]:
        """One start that ends by itself; its row."""
        with self.held(name, model, load_format, how, **environment):
            pass
        # Others may have added theirs at the same time.
        return next(row for row in reversed(self.rows) if row["start"] == name)

    def refused(self, model: Path, how: str, **environment: str) -> list[str]:
        """The reasons of the ranks of a start on wcache that ends by itself, without a token."""
        events, log, process = self._begun(model, "wcache", how, environment)
        try:
            assert process.stdout is not None
            told = process.stdout.read()
            process.wait(START_S)
        finally:
            end(process)
        if "BENCH" in told:
            raise AssertionError(f"the engine was to be refused: {log.read_text()[-2000:]}")
        return [event["reason"] for event in read(events) if event.get("outcome")]

    @contextlib.contextmanager
    def held(
        self, name: str, model: Path, load_format: str, how: str, **environment: str
    ) -> Iterator["subprocess.Popen[str]"]:
        """A start whose engine stays for as long as the block."""
        if load_format != "auto":
            self.tokens(model, how)
        events, log, process = self._begun(model, load_format, how, environment)
        lines: list[str] = []
        try:
            first = answer(process, lines)
            row: dict[str, Any] = {"start": name, "model": model.name, "mode": how, **first}
            text = "\n".join(lines) + log.read_text(errors="replace")
            for key, pattern in LOG_LINES.items():
                if found := re.findall(pattern, text):
                    row[key] = max(map(float, found))
            row |= summary(read(events))
            row["gpu"] = gpu_memory()
            self.rows.append(row)
            self.expect(
                first["tokens"] == self._tokens.setdefault((model, how), first["tokens"]),
                f"{name} ({how}): {first['total']:.1f} s, the same tokens; {row.get('reason', '')}",
            )
            yield process
        except AssertionError:
            # The first process that fails says why; what others say of it comes after that.
            told = [line for line in lines if "ERROR" in line or "wcache" in line]
            sys.stderr.write("\n".join(told[:40]) + log.read_text(errors="replace")[-3000:])
            raise
        finally:
            end(process)

    def _begun(
        self, model: Path, load_format: str, how: str, environment: Mapping[str, str]
    ) -> tuple[Path, Path, "subprocess.Popen[str]"]:
        number = next(self._numbers)
        events, log = self.work / f"events{number}", self.work / f"{number:02d}.log"
        events.touch(mode=0o600)
        told = {
            "BENCH_BEGAN": str(time.time()), "BENCH_TP": str(self.tp),
            "WCACHE_EVENTS": str(events), "WCACHE_ON_MISMATCH": "fail",
        }  # fmt: skip
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, HERE, str(model), load_format, how],
                env={**os.environ, **told, **environment}, text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
            )  # fmt: skip
        return events, log, process

    def expect(self, holds: bool, claim: str) -> None:
        print(f"  {'ok' if holds else 'WRONG'}: {claim}", flush=True)
        if not holds:
            self.failed.append(claim)

    @contextlib.contextmanager
    def preload(self, model: Path) -> Iterator[None]:
        """vLLM's own weight cache; its time to ready and its memory become a row."""
        import urllib.error
        import urllib.request

        path = self.work / "preload.log"
        with path.open("wb") as log:
            began = time.time()
            process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.cli.main", "preload", "--model",
                 str(model), "--max-model-len", "2048", "--skip-tokenizer-init",
                 "--tensor-parallel-size", str(self.tp),
                 "--weight-cache-health-port", str(PRELOAD_PORT)],
                stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip
        try:
            while True:
                with contextlib.suppress(urllib.error.URLError, OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{PRELOAD_PORT}/health", timeout=2)
                    break
                if process.poll() is not None or time.time() - began > START_S:
                    raise AssertionError(path.read_text()[-3000:])
                time.sleep(0.2)
            row = {"start": "in-tree daemon", "model": model.name, "mode": "",
                   "total": time.time() - began, "gpu": gpu_memory()}  # fmt: skip
            self.rows.append(row)
            print(f"  in-tree daemon: ready after {row['total']:.1f} s", flush=True)
            yield
        finally:
            end(process, signal.SIGTERM)

    @contextlib.contextmanager
    def told(self, result: Path | None) -> Iterator[None]:
        """Shows the table at the end of the block, however that ends, and keeps it as JSON."""
        try:
            yield
        finally:
            self._show()
            if result is not None:
                result.write_text(json.dumps(self.rows, indent=1))

    def verdict(self) -> int:
        """The exit status: 1 when a claim did not hold."""
        print("\n".join(f"WRONG: {claim}" for claim in self.failed) or "all claims hold")
        return 1 if self.failed else 0

    def _show(self) -> None:
        columns = (
            "total", "imports", "LLM()", "model loading", "wcache fetch", "wcache map",
            "wcache build", "wcache bind", "wcache process", "wcache attach", "wcache publish",
            "engine init", "compile", "capture",
        )  # fmt: skip
        print("| start | model | mode | " + " | ".join(columns) + " | GPUs MiB | processes |")
        print("|---" * (len(columns) + 5) + "|")
        for row in self.rows:
            cells = [f"{row[name]:.3g}" if name in row else "" for name in columns]
            gpu = row["gpu"]
            memory = [
                " + ".join(map(str, gpu["used_mib"])), " ".join(gpu["processes_mib"].values())
            ]  # fmt: skip
            print(f"| {' | '.join([row['start'], row['model'], row['mode'], *cells, *memory])} |")


def end(process: "subprocess.Popen[str]", first: signal.Signals | None = None) -> None:
    """Ends a process that leads a session: by the end of its input, or a signal, or by force."""
    if process.stdin is not None:
        process.stdin.close()
    if first is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, first)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def answer(process: "subprocess.Popen[str]", lines: list[str]) -> dict[str, Any]:
    """The next line that an engine tells; all others are kept in ``lines``."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("BENCH "):
            told: dict[str, Any] = json.loads(line.removeprefix("BENCH "))
            return told
        lines.append(line.rstrip())
    raise AssertionError(f"the engine ended with status {process.wait()}")


def say(process: "subprocess.Popen[str]", count: int) -> None:
    """Asks an engine for ``count`` tokens."""
    assert process.stdin is not None
    process.stdin.write(f"{count}\n")
    process.stdin.flush()


def read(events: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in events.read_text().splitlines()]


def summary(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each step the longest time that a rank took, and what became of all ranks."""
    found: dict[str, Any] = {}
    outcomes: Counter[str] = Counter()
    for event in events:
        if event.get("outcome"):
            outcomes[event["outcome"]] += 1
            found["reason"] = event.get("reason", "")
        elif event.get("seconds") is not None:
            name = f"wcache {event['name']}"
            found[name] = max(event["seconds"], found.get(name, 0.0))
    return {**found, "outcomes": dict(outcomes)}


# --- GPUs, files, wcache ----------------------------------------------------------------------


def is_free(before: Sequence[int]) -> bool:
    """Whether every GPU has as much memory free as when ``before`` MiB were used, within 5 s."""
    for _ in range(20):
        after = gpu_memory()["used_mib"]
        if all(now <= then + 64 for now, then in zip(after, before, strict=True)):
            return True
        time.sleep(0.25)
    return False


def without_processes() -> dict[str, Any]:
    """:func:`gpu_memory` once no process has a context, or after 5 s: loaders end after ``up``."""
    for _ in range(20):
        found = gpu_memory()
        if not found["processes_mib"]:
            break
        time.sleep(0.25)
    return found


def gpu_memory() -> dict[str, Any]:
    """MiB in use on each GPU, and by each process that has a context; empty without a driver."""
    used = [int(line) for line in smi("--query-gpu=memory.used")]
    per_process = dict(line.split(", ") for line in smi("--query-compute-apps=pid,used_memory"))
    return {"used_mib": used, "processes_mib": per_process}


def smi(query: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"],
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    return [line for line in done.stdout.splitlines() if line.strip()]


def forget_pages(model: Path) -> None:
    """Has the kernel drop the checkpoint from its page cache."""
    os.sync()
    for path in model.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def wcache(*arguments: str, **environment: str) -> str:
    """What a command says; raises AssertionError when it fails."""
    return said([sys.executable, "-m", "wcache", *arguments], **environment)


def said(command: Sequence[str], **environment: str) -> str:
    """What a command prints; raises AssertionError, with all of it, when it fails or hangs."""
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        end(process, signal.SIGTERM)  # wcache run ends what it has started
        raise AssertionError(f"{' '.join(command)} did not end in {COMMAND_S} s") from None
    if process.returncode:
        raise AssertionError(f"{' '.join(command)}: {out}{errors}")
    return out


def report(rank: int = 0, instance: str = "") -> "Report":
    """What the daemon of a rank says; raises AssertionError while there is none."""
    from wcache.paths import RankId, RankPaths
    from wcache.ranks import ask

    told = ask(RankPaths.of(RankId(instance, rank)))
    assert told is not None, "no daemon answers"
    return told


def is_back(before: "Report", rank: int = 0) -> bool:
    """Whether another daemon serves the same memory to as many engines, within half a minute."""
    deadline = time.time() + 30
    while time.time() < deadline:
        with contextlib.suppress(AssertionError):
            now = report(rank)
            if now.pid != before.pid and len(now.leases) == len(before.leases):
                return now.serving is not None and now.serving.how == "adopted"
        time.sleep(0.2)
    return False


@contextlib.contextmanager
def workplace(result: Path | None) -> Iterator[Path]:
    """A folder with an instance of its own in it; logs are kept beside ``result``.

    vLLM finds the plugin of a checkout that is not installed by a dist-info folder in it.
    """
    work = Path(tempfile.mkdtemp(prefix="wcb"))
    made = work / "plugin" / "wcache_bench-0.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: wcache-bench\nVersion: 0\n")
    (made / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nwcache = wcache.engines.vllm.plugin:register\n"
    )
    path = [str(made.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ.update(
        WCACHE_RUN_DIR=str(work / "run"), WCACHE_CONFIG_DIR=str(work / "etc"),
        WCACHE_STATE_DIR=str(work / "state"), VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
        PYTHONPATH=os.pathsep.join(filter(None, path)),
    )  # fmt: skip
    try:
        yield work
    finally:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            wcache("down", "--force")
        if result is not None:
            for log in work.glob("*.log"):
                shutil.copy(log, result.parent / f"start-{log.name}")
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    engine(*sys.argv[1:4])
