"""Measures vLLM's start on one GPU: from disk, on vLLM's own weight cache, and on wcache.

    python scripts/bench_vllm.py MODEL [--modes eager,graphs] [--stages …] [--result FILE.json]

MODEL is a checkpoint folder (scripts/random_qwen3.py makes one, in bf16 or FP8). vLLM and what
wcache needs must be importable, by PYTHONPATH for one. Everything in the table is of the same call,
with the same prompt. Ends with status 1 when a start gives other tokens than the first, or a claim
on the way does not hold.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import vllm_starts
from vllm_starts import (
    Starts,
    answer,
    forget_pages,
    gpu_memory,
    is_back,
    is_free,
    report,
    say,
    wcache,
)


def warm_up(starts: Starts, model: Path, modes: Sequence[str]) -> None:
    for how in modes:
        starts.start("disk, nothing compiled", model, "auto", how)


def cold(starts: Starts, model: Path, modes: Sequence[str]) -> None:
    forget_pages(model)
    starts.start("disk, page cache cold", model, "auto", modes[0])


def warm(starts: Starts, model: Path, modes: Sequence[str]) -> None:
    for how in modes:
        starts.start("disk, page cache warm", model, "auto", how)


def ipc_cache(starts: Starts, model: Path, modes: Sequence[str]) -> None:
    try:
        with starts.preload(model):
            for how in modes:
                starts.start("in-tree ipc_cache", model, "ipc_cache", how)
    except AssertionError as error:
        print(f"in-tree ipc_cache: not measured: {str(error)[-2000:]}", flush=True)


def publish(starts: Starts, model: Path, modes: Sequence[str]) -> None:
    up(model, "publish")
    starts.start("wcache, first start: publishes", model, "wcache", modes[0])
    print(f"  GPU with no engine: {gpu_memory()}", flush=True)
    for how in modes:
        starts.start("wcache, attaches", model, "wcache", how)
    two_engines(starts, model, modes[0])
    wcache("down", "--force")


def loader(starts: Starts, model: Path, modes: Sequence[str]) -> None:
    began = time.time()
    up(model, "vllm")
    print(f"  wcache up --loader vllm: {time.time() - began:.1f} s", flush=True)
    for how in modes:
        starts.start("wcache, attaches to --loader vllm", model, "wcache", how)
    wcache("down", "--force")


def up(model: Path, loader: str) -> None:
    wcache("up", "--model", str(model), "--loader", loader, "--device", "cuda")


def two_engines(starts: Starts, model: Path, how: str) -> None:
    """Two at a time on one copy; the daemon is killed while both generate."""
    alone = gpu_memory()["used_mib"][0]
    with starts.held("wcache, one of two", model, "wcache", how) as one:
        with starts.held("wcache, two of two", model, "wcache", how) as two:
            print(f"  with no engine {alone} MiB, with two {gpu_memory()}", flush=True)
            held = report()
            for process in (one, two):
                say(process, 1024)
            time.sleep(0.5)
            os.kill(held.pid, signal.SIGKILL)
            long = [answer(process, [])["tokens"] for process in (one, two)]
            starts.expect(long[0] == long[1], "both generate the same 1,024 tokens over kill -9")
            starts.expect(long[0][:16] == starts.tokens(model, how), "and they begin as from disk")
            starts.expect(is_back(held), "the new daemon adopted the memory and has both leases")
            for process in (one, two):
                say(process, 1024)
            starts.expect(
                [answer(process, [])["tokens"] for process in (one, two)] == long,
                "both give the same again afterwards",
            )


def at_once(starts: Starts, model: Path, modes: Sequence[str]) -> None:
    """Two that start at once on an empty rank: one publishes, the other waits and attaches.

    Each is told how much its KV cache takes: vLLM would measure what is free, and take the other's
    growth for its own.
    """
    starts.tokens(model, modes[0])
    up(model, "publish")
    with ThreadPoolExecutor(2) as pool:
        rows = list(
            pool.map(
                lambda name: starts.start(
                    f"wcache, {name} of two at once",
                    model,
                    "wcache",
                    modes[0],
                    BENCH_KV_BYTES=str(4 << 30),
                ),
                ("one", "other"),
            )
        )
    outcomes = sorted(outcome for row in rows for outcome in row["outcomes"])
    starts.expect(outcomes == ["hit", "published"], f"of two at once: {outcomes}")
    wcache("down", "--force")


STAGES = {
    "warm-up": warm_up, "cold": cold, "warm": warm, "ipc_cache": ipc_cache, "publish": publish,
    "loader": loader, "at-once": at_once,
}  # fmt: skip


def main(given: argparse.Namespace) -> int:
    with vllm_starts.workplace(given.result) as work:
        starts = Starts(work)
        with starts.told(given.result):
            before = gpu_memory()["used_mib"]
            for stage in given.stages.split(","):
                STAGES[stage](starts, given.model, given.modes.split(","))
            starts.expect(is_free(before), f"the GPU's memory is back: {before} MiB are in use")
    return starts.verdict()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measures vLLM's start on one GPU.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--modes", default="eager", help="eager, graphs, or both with a comma")
    parser.add_argument("--stages", default=",".join(STAGES), help="which of all, in their order")
    parser.add_argument("--result", type=Path, help="where rows go as JSON, and logs beside it")
    sys.exit(main(parser.parse_args()))
