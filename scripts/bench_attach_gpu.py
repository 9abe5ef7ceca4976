"""Attach on a GPU beside torch's own CUDA IPC: the same 20,000 tensors, in one run.

    python scripts/bench_attach_gpu.py [GIB] [TENSORS] [RUNS]

A publisher fills tensors of a synthetic rank (32 GiB by default), publishes them with wcache and
exports the same ones through torch.multiprocessing.reductions, whose form is torch's own pickle.
Fresh processes then take them the one way and the other, in turn, each timed after its CUDA context
exists. Also shown: what a store into the map does, a kill -9 of the daemon, and that the GPU's
memory is given back.
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

_PUBLISH = """
import sys, time
import torch, wcache
from multiprocessing.reduction import ForkingPickler
from torch.multiprocessing.reductions import reduce_tensor
total, count, handles = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(7)
module = torch.nn.Module()
weights = torch.Generator("cuda").manual_seed(7)
for index in range(count):
    # Sizes vary by a factor of three around the mean, as a model's do.
    elements = total // count // 2 * (2 + index % 5) // 4 // 64 * 64
    data = torch.empty(elements, dtype=torch.bfloat16, device="cuda").normal_(generator=weights)
    module.register_parameter(f"w{index}", torch.nn.Parameter(data, requires_grad=False))
nbytes = sum(p.numel() * 2 for p in module.parameters())
torch.cuda.synchronize()
began = time.perf_counter()
wcache.publish(module)
seconds = time.perf_counter() - began
print(f"published {nbytes / 2**30:.1f} GiB, {count} tensors, in {seconds:.2f} s", flush=True)
with open(handles, "wb") as file:
    exported = [(name, reduce_tensor(p.data)) for name, p in module.named_parameters()]
    file.write(ForkingPickler.dumps(exported))
print("exported", flush=True)
sys.stdin.readline()
"""
_WCACHE = """
import json, time
import torch, wcache.client, wcache.memory.cuda
torch.zeros(1, device="cuda"); torch.cuda.synchronize()
began = time.perf_counter()
attachment = wcache.client.attach()
tensors = attachment.tensors
count = sum(1 for _ in tensors.values())
torch.cuda.synchronize()
taken = time.perf_counter() - began
total = sum(float(tensors[f"w{i}"].float().sum()) for i in range(0, count, 997))
print(json.dumps({"s": taken, "count": count, "sum": total}))
"""
_TORCH = """
import json, sys, time
import torch
from multiprocessing.reduction import ForkingPickler
from torch.multiprocessing import reductions
torch.zeros(1, device="cuda"); torch.cuda.synchronize()
data = open(sys.argv[1], "rb").read()
began = time.perf_counter()
tensors = {name: rebuild(*arguments) for name, (rebuild, arguments) in ForkingPickler.loads(data)}
torch.cuda.synchronize()
taken = time.perf_counter() - began
count = len(tensors)
total = sum(float(tensors[f"w{i}"].float().sum()) for i in range(0, count, 997))
print(json.dumps({"s": taken, "count": count, "sum": total}))
"""
_STORE = """
import torch, wcache.client
tensor = wcache.client.attach().tensors["w0"]
try:
    tensor.zero_(); torch.cuda.synchronize()
except Exception as error:
    print("a store into the map:", str(error).splitlines()[0])
else:
    print("a store into the map: NOT BLOCKED")
"""


def main(gib: float, tensors: int, runs: int) -> None:
    root = Path(tempfile.mkdtemp(prefix="wcache-bench-"))
    os.environ.update(
        WCACHE_RUN_DIR=str(root / "run"),
        WCACHE_CONFIG_DIR=str(root / "etc"),
        WCACHE_STATE_DIR=str(root / "state"),
    )
    print(f"GPU memory used at the start: {used_mib()} MiB", flush=True)
    try:
        wcache("up", "--model", "synthetic", "--loader", "publish", "--device", "cuda", "--tp", "1")
        measure(root / "handles", int(gib * 2**30), tensors, runs)
        survive()
    finally:
        wcache("down", "--force")
        shutil.rmtree(root, ignore_errors=True)
    time.sleep(2)
    print(f"GPU memory used after down: {used_mib()} MiB", flush=True)


def measure(handles: Path, nbytes: int, tensors: int, runs: int) -> None:
    command = [sys.executable, "-c", _PUBLISH, str(nbytes), str(tensors), str(handles)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as publisher:
        try:
            assert publisher.stdout
            for line in iter(publisher.stdout.readline, ""):
                print(line.strip(), flush=True)
                if line == "exported\n":
                    break
            compare(handles, runs)
        finally:
            publisher.kill()


def compare(handles: Path, runs: int) -> None:
    times: dict[str, list[float]] = {"wcache": [], "torch": []}
    sums = set()
    for _ in range(runs):
        for name, program in (("wcache", _WCACHE), ("torch", _TORCH)):
            facts = run(program, str(handles))
            times[name].append(facts["s"])
            sums.add((facts["count"], facts["sum"]))
    mine, theirs = (statistics.median(times[name]) for name in ("wcache", "torch"))
    print(f"{'':24}{'median':>10}{'least':>10}{'most':>10}")
    for name, taken in times.items():
        row = (statistics.median(taken), min(taken), max(taken))
        print(f"{name + ', attach':24}" + "".join(f"{value:9.3f}s" for value in row))
    print(f"torch's CUDA IPC takes {theirs / mine:.1f} times as long")
    print(f"both saw the same values: {len(sums) == 1}", flush=True)


def survive() -> None:
    """kill -9 of the daemon when nobody but the supervisor holds the memory."""
    time.sleep(2)
    print(f"GPU memory used, no process attached: {used_mib()} MiB, processes: {processes()!r}")
    before = run(_WCACHE)["sum"]
    print(run_text(_STORE).strip().splitlines()[-1], flush=True)
    ready = Path(os.environ["WCACHE_RUN_DIR"], "0", "rank.ready")
    old = json.loads(ready.read_bytes())["pid"]
    began = time.perf_counter()
    os.kill(old, signal.SIGKILL)
    while not ready.exists() or json.loads(ready.read_bytes())["pid"] == old:
        time.sleep(0.001)
        if time.perf_counter() - began > 60:
            sys.exit("the daemon did not come back")
    print(f"kill -9 of the daemon to ready: {time.perf_counter() - began:.3f} s")
    print(f"same values afterwards: {run(_WCACHE)['sum'] == before}")
    began = time.perf_counter()
    wcache("verify")
    print(f"wcache verify, the whole command: {time.perf_counter() - began:.1f} s", flush=True)


def run(program: str, *arguments: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(run_text(program, *arguments).splitlines()[-1])
    return facts


def run_text(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    return done.stdout


def wcache(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "wcache", *arguments], timeout=300, check=True)


def used_mib() -> str:
    return query("--query-gpu=memory.used", "--format=csv,noheader,nounits")


def processes() -> str:
    return query("--query-compute-apps=pid,used_memory", "--format=csv,noheader")


def query(*arguments: str) -> str:
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    words = sys.argv[1:]
    if words and not words[0].replace(".", "").isdigit():
        sys.exit(__doc__)
    main(
        float(words[0]) if words else 32.0,
        int(words[1]) if len(words) > 1 else 20_000,
        int(words[2]) if len(words) > 2 else 3,
    )
