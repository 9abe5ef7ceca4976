"""The main job, shown step by step; ends with status 1 at the first claim that fails.

    python scripts/demo.py CHECKPOINT [cpu|cuda]

Everything runs in folders of the demo's own and is gone afterwards.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MIB = 1 << 20


def main(checkpoint: Path, device: str) -> None:
    root = Path(tempfile.mkdtemp(prefix="wcache-demo-"))
    os.environ.update(
        WCACHE_RUN_DIR=str(root / "run"),
        WCACHE_CONFIG_DIR=str(root / "etc"),
        WCACHE_STATE_DIR=str(root / "state"),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it cleans up
    try:
        one_rank(checkpoint, device)
        if device == "cpu":
            three_ranks(checkpoint)
    finally:
        for instance in ("", "three"):
            wcache("down", "--force", *named(instance), check=False, quiet=True)
        shutil.rmtree(root, ignore_errors=True)
    print("\nEverything above was checked, not only printed.")


def one_rank(checkpoint: Path, device: str) -> None:
    before = memory_used(device)

    step("Load the model into a daemon; a supervisor keeps its memory's descriptors")
    wcache("up", "--model", str(checkpoint), "--tp", "1", "--device", device)
    first = rank_status()
    expect(first["how"] == "loaded", "the rank was loaded from disk")
    held = memory_used(device) - before
    print(f"  {MEMORY[device]} in use: {held // MIB} MiB more than before")

    step("A fresh engine takes its weights from the map; another one reads them from disk")
    with engine(checkpoint, "--serve") as serving:
        mapped = read_line(serving)
        from_disk = run_engine(checkpoint, f"--disk={device}")
        expect(mapped["tokens"] == from_disk["tokens"], "both generate the same tokens")
        for text in mapped["texts"]:
            print(f"  > {text!r}")
        print(f"  model ready: from the map {mapped['ready_s']:.2f} s, from disk (in the page")
        print(f"  cache) {from_disk['ready_s']:.2f} s; both after imports")

        step("kill -9 of the daemon while that engine generates, with the checkpoint moved away")
        weights_bytes = size_of(checkpoint)
        with moved_away(checkpoint):
            os.kill(first["pid"], signal.SIGKILL)
            second, seconds = wait_for_new_daemon(first["pid"])
            expect(second["how"] == "adopted", "the new daemon adopted the memory")
            read = bytes_read(second["pid"])
            print(f"  ready again after {seconds:.2f} s with pid {second['pid']}")
            print(f"  that daemon has read {read // 1024} KiB in all (/proc/PID/io): Python's own")
            print(f"  modules, and nothing of the checkpoint's {weights_bytes // MIB} MiB, which")
            print("  were not there to be read")
            for _ in range(3):
                expect(read_line(serving)["same"], "the engine goes on with the same answers")
            wait_until(lambda: rank_status()["leases"] == 1, "the engine renews its lease")
            again = run_engine(checkpoint)
            expect(again["tokens"] == mapped["tokens"], "a new engine attaches to the same memory")

    step("Every byte is still the one that was published")
    wcache("verify")

    step("Take it down; the memory is free again")
    wcache("down")
    # Others on this machine may use some of it for a moment.
    little = size_of(checkpoint) // 10
    wait_until(lambda: memory_used(device) - before < little, "the weights' memory was given back")
    left = memory_used(device) - before
    print(f"  {MEMORY[device]} in use: {left // MIB} MiB more than at the start")


def three_ranks(checkpoint: Path) -> None:
    step("Tensor parallel: 9 heads and 3 key-value heads divide by three, not by two")
    refused = wcache("up", "--model", str(checkpoint), "--tp", "2", "--device", "cpu",
                     "--instance", "three", check=False)  # fmt: skip
    expect(refused != 0, "tp 2 is refused")
    wcache("up", "--model", str(checkpoint), "--tp", "3", "--device", "cpu", "--instance", "three")
    from demo_shards import compare

    count, split = compare(checkpoint, tp=3, instance="three")
    print(f"  {count} tensors, {split} of them split: put together again they are the")
    print("  checkpoint's, bit by bit")
    wcache("verify", "--instance", "three")
    wcache("down", "--instance", "three")


# --- what the steps are made of -------------------------------------------------------------------


def step(title: str) -> None:
    print(f"\n== {title}", flush=True)


def expect(holds: bool, claim: str) -> None:
    if not holds:
        sys.exit(f"demo: NOT shown: {claim}")
    print(f"  ok: {claim}", flush=True)


def named(instance: str) -> list[str]:
    return ["--instance", instance] if instance else []


def wcache(*arguments: str, check: bool = True, quiet: bool = False) -> int:
    """Runs the command as an operator would; ends the demo if it fails."""
    if not quiet:
        print(f"  $ wcache {' '.join(arguments)}", flush=True)
    out = subprocess.DEVNULL if quiet else None
    command = [sys.executable, "-m", "wcache", *arguments]
    status = subprocess.run(command, stdout=out, stderr=out, timeout=300, check=False).returncode
    if check and status != 0:
        sys.exit(f"demo: wcache {' '.join(arguments)} ended with {status}")
    return status


def rank_status() -> dict[str, Any]:
    """Rank 0 as ``wcache status --json`` tells of it."""
    command = [sys.executable, "-m", "wcache", "status", "--json"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    rank: dict[str, Any] = json.loads(done.stdout)["ranks"][0]
    return rank


def wait_for_new_daemon(old_pid: int) -> tuple[dict[str, Any], float]:
    """Waits for the ready file of the next daemon; its status, and how long it took."""
    began = time.monotonic()
    ready = Path(os.environ["WCACHE_RUN_DIR"], "0", "rank.ready")

    def is_new() -> bool:
        try:
            return bool(json.loads(ready.read_bytes())["pid"] != old_pid)
        except FileNotFoundError:
            return False

    wait_until(is_new, "a new daemon is ready")
    return rank_status(), time.monotonic() - began


def wait_until(holds: Any, claim: str) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        if time.monotonic() > deadline:
            sys.exit(f"demo: NOT shown within 30 s: {claim}")
        time.sleep(0.005)


@contextlib.contextmanager
def engine(checkpoint: Path, *flags: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, str(HERE / "demo_engine.py"), str(checkpoint), *flags]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            if process.stdin:
                process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def run_engine(checkpoint: Path, *flags: str) -> dict[str, Any]:
    with engine(checkpoint, *flags) as process:
        return read_line(process)


def read_line(process: "subprocess.Popen[str]") -> dict[str, Any]:
    line = process.stdout.readline() if process.stdout else ""
    if not line:
        sys.exit("demo: the engine ended before it had answered")
    facts: dict[str, Any] = json.loads(line)
    return facts


@contextlib.contextmanager
def moved_away(checkpoint: Path) -> Iterator[None]:
    """Takes the weights, and only them, out of the checkpoint's folder."""
    aside = Path(tempfile.mkdtemp(dir=checkpoint.parent))
    moved = [(path, aside / path.name) for path in checkpoint.glob("*.safetensors")]
    try:
        for path, place in moved:
            path.rename(place)
        yield
    finally:
        for path, place in moved:
            if place.exists():
                place.rename(path)
        aside.rmdir()


def size_of(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))


def bytes_read(pid: int) -> int:
    """Everything that ``pid`` has got from read(2) and its kin, from disk or page cache."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


MEMORY = {"cpu": "shared memory", "cuda": "memory of the GPUs"}


def memory_used(device: str) -> int:
    """Bytes in use on the whole machine: memfds, tmpfs and the like, or all GPUs' memory."""
    if device == "cuda":
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return sum(int(line) for line in done.stdout.split()) * MIB
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["cpu"], ["cuda"]):
        sys.exit(__doc__)
    main(Path(sys.argv[1]).resolve(), (sys.argv[2:] or ["cpu"])[0])
