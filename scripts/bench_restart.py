"""Measures what a restart costs: the daemon's memory, kill -9 to ready, attach beside a disk load.

    python scripts/bench_restart.py CHECKPOINT [RUNS]

Loads CHECKPOINT into rank 0 of an instance of the benchmark's own, on the CPU, and prints medians.
Every figure beside another one is of the same run; the disk's files are in the page cache.
"""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Each measured in a process of its own, after its imports: what an engine would add to its start.
_ATTACH = """
import json, sys, time
import torch, wcache.client, wcache.memory.host
began = time.perf_counter()
attachment = wcache.client.attach()
tensors = attachment.tensors
print(json.dumps(time.perf_counter() - began))
"""
_LOAD_FILE = """
import json, sys, time
import torch, safetensors.torch
from pathlib import Path
began = time.perf_counter()
tensors = {}
for shard in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    tensors.update(safetensors.torch.load_file(shard))
# load_file maps the file; an engine needs the bytes in memory of its own.
tensors = {name: tensor.clone() for name, tensor in tensors.items()}
print(json.dumps(time.perf_counter() - began))
"""
# The model's code is imported before the clock starts: it is the same for both.
_IMPORTED = """
import json, sys, time
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from wcache.engines.transformers import from_cache
import wcache.memory.host
MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.from_pretrained(sys.argv[1]))]
began = time.perf_counter()
"""
_FROM_CACHE = (
    _IMPORTED
    + """
model = from_cache()
sum(float(parameter.sum()) for parameter in model.parameters())
print(json.dumps(time.perf_counter() - began))
"""
)
_FROM_DISK = (
    _IMPORTED
    + """
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
# from_pretrained maps the file; what is read when a weight is first used is counted here.
sum(float(parameter.sum()) for parameter in model.parameters())
print(json.dumps(time.perf_counter() - began))
"""
)


def main(checkpoint: Path, runs: int) -> None:
    root = Path(tempfile.mkdtemp(prefix="wcache-bench-"))
    os.environ.update(
        WCACHE_RUN_DIR=str(root / "run"),
        WCACHE_CONFIG_DIR=str(root / "etc"),
        WCACHE_STATE_DIR=str(root / "state"),
        HF_HUB_OFFLINE="1",
    )
    try:
        wcache("up", "--model", str(checkpoint), "--tp", "1", "--device", "cpu")
        report(checkpoint, runs)
    finally:
        wcache("down", "--force")
        shutil.rmtree(root, ignore_errors=True)


def report(checkpoint: Path, runs: int) -> None:
    kills = [kill_to_ready() for _ in range(runs)]
    resident, proportional = memory_of(ready()["pid"])
    attach, load = side_by_side(_ATTACH, _LOAD_FILE, checkpoint, runs)
    cached, disk = side_by_side(_FROM_CACHE, _FROM_DISK, checkpoint, runs)
    size = ready()["bytes"]
    print(f"weights                        {size / 2**20:8.1f} MiB, {ready()['tensors']} tensors")
    print(f"daemon, resident               {resident / 2**20:8.1f} MiB")
    print(f"daemon, proportional           {proportional / 2**20:8.1f} MiB")
    print(f"kill -9 to ready               {med(kills) * 1e3:8.1f} ms")
    print(f"attach, map and make tensors   {attach * 1e3:8.1f} ms")
    print(f"load_file and copy             {load * 1e3:8.1f} ms, {load / attach:.1f} times as long")
    print(f"model from the cache, all read {cached * 1e3:8.1f} ms")
    print(f"model from disk, all read      {disk * 1e3:8.1f} ms, {disk / cached:.1f} times as long")


def side_by_side(first: str, second: str, checkpoint: Path, runs: int) -> tuple[float, float]:
    """Medians of the two programs, run in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs):
        for program, taken in zip((first, second), times, strict=True):
            command = [sys.executable, "-c", program, str(checkpoint)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
            taken.append(json.loads(done.stdout.splitlines()[-1]))
    return med(times[0]), med(times[1])


def kill_to_ready() -> float:
    """Seconds from SIGKILL to the ready file of the next daemon."""
    old = ready()["pid"]
    began = time.perf_counter()
    os.kill(old, signal.SIGKILL)
    while True:
        facts = ready()
        if facts and facts["pid"] != old:
            taken = time.perf_counter() - began
            # A supervisor backs off from a daemon that dies soon after its start.
            time.sleep(11)
            return taken
        if time.perf_counter() - began > 60:
            sys.exit("the daemon did not come back within 60 s")
        time.sleep(0.001)


def ready() -> dict[str, Any]:
    try:
        path = Path(os.environ["WCACHE_RUN_DIR"], "0", "rank.ready")
        facts: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    return facts


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes of RAM that ``pid`` maps, and its share of them where pages are shared."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = {words[0]: int(words[1]) * 1024 for line in lines[1:] if (words := line.split())}
    return sizes["Rss:"], sizes["Pss:"]


def med(values: list[float]) -> float:
    return statistics.median(values)


def wcache(*arguments: str) -> None:
    command = [sys.executable, "-m", "wcache", *arguments]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300,
                   check=True)  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) == 3 else 5)
