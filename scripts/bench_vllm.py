"""Measures vLLM's start on one GPU: from disk, on vLLM's own weight cache, and on wcache.

    python scripts/bench_vllm.py MODEL [RESULT.json] [eager,graphs]

MODEL is a checkpoint folder; it needs no tokenizer (scripts/random_qwen3.py makes one). vLLM and
what wcache needs must be importable, by PYTHONPATH for one; the plugin is found by a folder that
this makes. Everything in the table is of the same call, with the same prompt. Ends with status 1
when a start gives other tokens than the first, or a claim on the way does not hold.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))

if TYPE_CHECKING:
    from wcache.protocol import Report

LOG_LINES = {
    "model loading": r"Model loading took .*? (?:memory )?and ([\d.]+) s",
    "compile": r"torch\.compile (?:took|takes) ([\d.]+) s",
    "capture": r"Graph capturing finished in ([\d.]+) s",
    "engine init": r"init engine \(.*?\) took ([\d.]+) s",
}
START_S = 400


# --- the engine's own process -----------------------------------------------------------------


def engine(model: str, load_format: str, how: str) -> None:
    """One start to the first tokens, told as a line of JSON; again for each line on stdin."""
    began = float(os.environ["BENCH_BEGAN"])
    from vllm import LLM, SamplingParams

    imported = time.time()
    llm = LLM(
        model=model, load_format=load_format, skip_tokenizer_init=True,
        enforce_eager=how == "eager", max_model_len=2048, enable_prefix_caching=False,
        gpu_memory_utilization=float(os.environ.get("BENCH_UTILIZATION", "0.45")),
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


class Bench:
    def __init__(self, model: Path, work: Path) -> None:
        self.model = model
        self.work = work
        self.tokens: list[int] = []
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []

    def start(self, name: str, load_format: str, how: str) -> dict[str, Any]:
        """One start that ends by itself."""
        with self.held(name, load_format, how):
            pass
        return self.rows[-1]

    @contextlib.contextmanager
    def held(self, name: str, load_format: str, how: str) -> Iterator["subprocess.Popen[str]"]:
        """A start whose engine stays for as long as the block."""
        number = len(self.rows)
        events, log = self.work / f"events{number}", self.work / f"{number}.log"
        events.touch(mode=0o600)
        environment = {
            **os.environ, "BENCH_BEGAN": str(time.time()), "WCACHE_EVENTS": str(events),
            "WCACHE_ON_MISMATCH": "fail",
        }  # fmt: skip
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, HERE, "--engine", str(self.model), load_format, how],
                env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, start_new_session=True,
            )  # fmt: skip
        lines: list[str] = []
        try:
            told = answer(process, lines)
            row: dict[str, Any] = {"start": name, "mode": how, **told}
            text = "\n".join(lines) + log.read_text(errors="replace")
            for key, pattern in LOG_LINES.items():
                if found := re.search(pattern, text):
                    row[key] = float(found[1])
            for line in events.read_text().splitlines():
                event = json.loads(line)
                if event.get("outcome"):
                    row["outcome"], row["reason"] = event["outcome"], event.get("reason", "")
                elif event.get("seconds") is not None:
                    row[f"wcache {event['name']}"] = event["seconds"]
            row["gpu"] = gpu_memory()
            self.rows.append(row)
            self.check(name, told["tokens"])
            print(f"{name} ({how}): {told['total']:.1f} s, {row.get('reason', '')}", flush=True)
            yield process
        except AssertionError:
            sys.stderr.write("\n".join(lines[-20:]) + log.read_text(errors="replace")[-6000:])
            raise
        finally:
            if process.stdin is not None:
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def check(self, name: str, tokens: list[int]) -> None:
        self.tokens = self.tokens or tokens
        if tokens[: len(self.tokens)] != self.tokens:
            self.failed.append(f"{name} gives other tokens")

    def expect(self, holds: bool, claim: str) -> None:
        print(f"  {'ok' if holds else 'WRONG'}: {claim}", flush=True)
        if not holds:
            self.failed.append(claim)


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
    assert process.stdin is not None
    process.stdin.write(f"{count}\n")
    process.stdin.flush()


def gpu_memory() -> dict[str, Any]:
    """MiB in use on the first GPU in all, and by each process that has a context."""
    used = smi("--query-gpu=memory.used")[0]
    per_process = dict(line.split(", ") for line in smi("--query-compute-apps=pid,used_memory"))
    return {"used_mib": int(used), "processes_mib": per_process}


def smi(query: str) -> list[str]:
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits", "--id=0"],
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


def wcache(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "wcache", *arguments], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise AssertionError(f"wcache {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout


def report() -> "Report":
    """What the daemon of rank 0 says; raises AssertionError while there is none."""
    from wcache.paths import RankId, RankPaths
    from wcache.ranks import ask

    told = ask(RankPaths.of(RankId("", 0)))
    assert told is not None, "no daemon answers"
    return told


def plugin(folder: Path) -> Path:
    """A dist-info folder by which vLLM finds the plugin of a checkout that is not installed."""
    made = folder / "wcache_bench-0.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: wcache-bench\nVersion: 0\n")
    (made / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nwcache = wcache.engines.vllm.plugin:register\n"
    )
    return folder


@contextlib.contextmanager
def preload(bench: Bench) -> Iterator[None]:
    """vLLM's own weight cache; its time to ready and its memory become a row."""
    port = 18_477
    log: IO[bytes]
    with (bench.work / "preload.log").open("wb") as log:
        began = time.time()
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", "preload", "--model",
             str(bench.model), "--max-model-len", "2048", "--skip-tokenizer-init",
             "--weight-cache-health-port", str(port)],
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    import urllib.error
    import urllib.request

    try:
        while True:
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            if process.poll() is not None or time.time() - began > START_S:
                raise AssertionError((bench.work / "preload.log").read_text()[-3000:])
            time.sleep(0.2)
        total = time.time() - began
        row = {"start": "in-tree daemon", "mode": "", "total": total, "gpu": gpu_memory()}
        bench.rows.append(row)
        print(f"in-tree daemon: ready after {total:.1f} s", flush=True)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def measure(bench: Bench, modes: Sequence[str]) -> None:
    before = gpu_memory()["used_mib"]
    bench.start("warm-up of imports and kernels", "auto", modes[0])
    forget_pages(bench.model)
    bench.start("disk, page cache cold", "auto", modes[0])
    for how in modes:
        bench.start("disk, page cache warm", "auto", how)
    try:
        with preload(bench):
            for how in modes:
                bench.start("in-tree ipc_cache", "ipc_cache", how)
    except AssertionError as error:
        print(f"in-tree ipc_cache: not measured: {str(error)[-2000:]}", flush=True)
    wcache("up", "--model", str(bench.model), "--loader", "publish", "--device", "cuda")
    bench.start("wcache, first start: publishes", "wcache", modes[0])
    print(f"  GPU with no engine: {gpu_memory()}", flush=True)
    for how in modes:
        bench.start("wcache, attaches", "wcache", how)
    two_engines(bench, modes[0])
    wcache("down", "--force")
    after = gpu_memory()["used_mib"]
    bench.expect(after <= before + 64, f"the GPU's memory is back: {before} to {after} MiB")


def two_engines(bench: Bench, how: str) -> None:
    """Two at a time on one copy; the daemon is killed while both generate."""
    alone = gpu_memory()["used_mib"]
    with bench.held("wcache, one of two", "wcache", how) as one:
        with bench.held("wcache, two of two", "wcache", how) as two:
            memory = gpu_memory()
            print(f"  with no engine {alone} MiB, with two {memory}", flush=True)
            held = report()
            for process in (one, two):
                say(process, 1024)
            time.sleep(0.5)
            os.kill(held.pid, signal.SIGKILL)
            long = [answer(process, [])["tokens"] for process in (one, two)]
            bench.expect(long[0] == long[1], "both generate the same 1,024 tokens over kill -9")
            bench.expect(long[0][:16] == bench.tokens, "and they begin as from disk")
            bench.expect(is_back(held), "the new daemon adopted the memory and has both leases")
            for process in (one, two):
                say(process, 1024)
            bench.expect(
                [answer(process, [])["tokens"] for process in (one, two)] == long,
                "both give the same again afterwards",
            )


def is_back(before: "Report") -> bool:
    """Whether another daemon serves the same generation to two engines, within half a minute."""
    deadline = time.time() + 30
    while time.time() < deadline:
        with contextlib.suppress(AssertionError):
            now = report()
            if now.pid != before.pid and len(now.leases) == 2:
                return now.serving is not None and now.serving.how == "adopted"
        time.sleep(0.2)
    return False


def show(rows: Sequence[dict[str, Any]]) -> None:
    columns = ("total", "imports", "LLM()", "model loading", "wcache map", "wcache build",
               "wcache bind", "wcache process", "wcache attach", "wcache publish", "engine init",
               "capture")  # fmt: skip
    print("| start | mode | " + " | ".join(columns) + " | GPU MiB |")
    print("|---" * (len(columns) + 3) + "|")
    for row in rows:
        cells = [f"{row[name]:.3g}" if name in row else "" for name in columns]
        used = row.get("gpu", {}).get("used_mib", "")
        print(f"| {row['start']} | {row['mode']} | " + " | ".join(cells) + f" | {used} |")


def main(model: Path, result: Path | None, modes: Sequence[str]) -> int:
    work = Path(tempfile.mkdtemp(prefix="wcb"))
    os.environ.update(
        WCACHE_RUN_DIR=str(work / "run"), WCACHE_CONFIG_DIR=str(work / "etc"),
        WCACHE_STATE_DIR=str(work / "state"), VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
        PYTHONPATH=os.pathsep.join(
            [str(plugin(work / "plugin")), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
        ),
    )  # fmt: skip
    bench = Bench(model, work)
    try:
        measure(bench, modes)
    finally:
        show(bench.rows)
        if result is not None:
            result.write_text(json.dumps(bench.rows, indent=1))
            for log in work.glob("*.log"):
                shutil.copy(log, result.parent / f"bench-{log.name}")
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            wcache("down", "--force")
        shutil.rmtree(work, ignore_errors=True)
    print("\n".join(f"WRONG: {claim}" for claim in bench.failed) or "all tokens equal")
    return 1 if bench.failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        engine(*sys.argv[2:5])
    else:
        given = sys.argv[1:]
        sys.exit(
            main(
                Path(given[0]),
                Path(given[1]) if len(given) > 1 else None,
                given[2].split(",") if len(given) > 2 else ("eager",),
            )
        )
