"""Tensor parallel on two GPUs: what survives what, and where each rank's weights lie.

    python scripts/two_gpus.py MODEL [--fp8 MODEL] [--stages …] [--device cpu] [--result FILE.json]

Starts vLLM at tensor-parallel 2 from disk, on vLLM's own weight cache and on wcache, kills,
restarts and loses one rank's daemon, and has engines see the GPUs in other orders. Each claim is
checked and printed; ends with status 1 when one does not hold. ``--device cpu`` is for trying the
script itself: what is of GPUs is left out.
"""

import argparse
import contextlib
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import vllm_starts
from safetensors.torch import load_file
from vllm_starts import (
    Starts,
    answer,
    forget_pages,
    gpu_memory,
    is_back,
    is_free,
    report,
    said,
    say,
    wcache,
    without_processes,
)

RANKS = (0, 1)
IN_ORDER, REVERSED = "0,1", "1,0"
GENERATED = 512
ROUNDS = 7
LOGITS = Path(__file__).with_name("shared_logits.py")
CLOSE = 1e-4
"""Of the largest logit, in float32: the ranks' sums are made in another order."""
CHECKPOINT_MAY_READ = 8 << 20
"""Of a daemon's start: Python and its modules, and no weights."""


class Node:
    """One run of everything; ``device`` is cuda or cpu."""

    def __init__(self, starts: Starts, device: str) -> None:
        self.starts = starts
        self.device = device

    def up(self, model: Path, *options: str, **environment: str) -> None:
        wcache("up", "--model", str(model), "--tp", "2", "--device", self.device,
               *options, **environment)  # fmt: skip

    def stock(self, model: Path) -> None:
        self.starts.start("warm-up of imports and kernels", model, "auto", "eager")
        if self.device == "cpu":
            return
        forget_pages(model)
        self.starts.start("disk, page cache cold", model, "auto", "eager")
        self.starts.start("disk, page cache warm", model, "auto", "eager")
        try:
            with self.starts.preload(model):
                self.starts.start("in-tree ipc_cache", model, "ipc_cache", "eager")
        except AssertionError as error:
            print(f"in-tree ipc_cache: not measured: {str(error)[-2000:]}", flush=True)

    def publish_and_attach(self, model: Path) -> None:
        before = gpu_memory()["used_mib"]
        self.up(model, "--loader", "publish")
        row = self.starts.start("wcache, first start: publishes", model, "wcache", "eager")
        self.expect(row["outcomes"] == {"published": 2}, f"both ranks publish: {row['outcomes']}")
        self.place(before, list(RANKS))
        row = self.starts.start("wcache, attaches", model, "wcache", "eager")
        self.expect(row["outcomes"] == {"hit": 2}, f"both ranks attach: {row['outcomes']}")

    def place(self, before: list[int], gpus: list[int]) -> None:
        """Each rank's slabs are on its own GPU, which its fingerprint names by UUID."""
        after = without_processes()["used_mib"]
        uuids = vllm_starts.smi("--query-gpu=uuid")
        for rank, index in zip(RANKS, gpus, strict=True):
            serving = report(rank).serving
            assert serving is not None
            mib = serving.slab_bytes >> 20
            if self.device == "cpu":
                continue
            named = serving.fingerprint.device_uuid
            taken = after[index] - before[index]
            self.expect(named == uuids[index], f"rank {rank} names {named}, GPU {index}")
            self.expect(
                mib <= taken <= mib + 64, f"GPU {index} took {taken} MiB for rank {rank}'s {mib}"
            )

    def disturb(self, model: Path) -> None:
        """One rank's daemon restarted, the other's killed, while an engine generates."""
        with self.starts.held("wcache, one rank disturbed", model, "wcache", "eager") as engine:
            say(engine, GENERATED)
            undisturbed = answer(engine, [])["tokens"]
            with moved_away(model):
                for rank, how in ((1, "restart"), (0, "kill -9")):
                    other = report(1 - rank)
                    held = report(rank)
                    say(engine, GENERATED)
                    time.sleep(0.3)
                    began = time.time()
                    if how == "restart":
                        wcache("restart", str(rank))
                    else:
                        os.kill(held.pid, signal.SIGKILL)
                    back = is_back(held, rank)
                    seconds = time.time() - began
                    tokens = answer(engine, [])["tokens"]
                    self.expect(back, f"{how} of rank {rank}: back in {seconds:.1f} s, adopted")
                    self.expect(tokens == undisturbed, "the engine generates as before")
                    self.expect(report(1 - rank).pid == other.pid, "the other rank is untouched")
                    read = read_bytes(report(rank).pid)
                    self.expect(
                        read < CHECKPOINT_MAY_READ,
                        f"the new daemon has read {read >> 10} KiB, and no checkpoint is there",
                    )

    def lose(self, model: Path) -> None:
        """Rank 1's memory really lost: that rank alone is read from disk again."""
        kept = report(0)
        wcache("down", "1")
        print(f"  rank 1 is down: {gpu_memory()}", flush=True)
        wcache("up")
        row = self.starts.start("wcache, rank 1 lost: publishes alone", model, "wcache", "eager")
        self.expect(
            row["outcomes"] == {"hit": 1, "published": 1}, f"one reads disk: {row['outcomes']}"
        )
        self.expect(report(0).pid == kept.pid, "rank 0 was left alone")
        row = self.starts.start("wcache, attaches again", model, "wcache", "eager")
        self.expect(row["outcomes"] == {"hit": 2}, f"both ranks attach: {row['outcomes']}")

    def verify(self) -> None:
        for ranks in ((), ("0",), ("1",)):
            began = time.time()
            told = wcache("verify", *ranks)
            of = f"rank {ranks[0]}" if ranks else "both ranks at once"
            print(f"  verify {of}: {time.time() - began:.2f} s\n{indented(told)}", flush=True)

    def attach(self) -> None:
        """Both ranks' attach in parallel, beside one after the other."""
        with attachers() as pipes:
            took = [(attach_s(pipes, together=True), attach_s(pipes, together=False))
                    for _ in range(ROUNDS)]  # fmt: skip
        for name, seconds in zip(
            ("in parallel", "one after the other"), zip(*took, strict=True), strict=True
        ):
            told = ", ".join(f"{1e3 * one:.1f}" for one in seconds)
            median = 1e3 * statistics.median(seconds)
            print(f"  attach of both ranks {name}: median {median:.1f} ms ({told})", flush=True)

    def orders(self, model: Path) -> None:
        """The loader and engines see the GPUs in different orders."""
        before = gpu_memory()["used_mib"]
        self.up(model, "--loader", "publish", CUDA_VISIBLE_DEVICES=REVERSED)
        row = self.starts.start(
            "wcache, GPUs reversed: publishes", model, "wcache", "eager",
            CUDA_VISIBLE_DEVICES=REVERSED,
        )  # fmt: skip
        self.expect(row["outcomes"] == {"published": 2}, f"reversed: {row['outcomes']}")
        self.place(before, [1, 0])
        reasons = self.starts.refused(model, "eager")
        self.expect(
            bool(reasons) and all("device_uuid" in reason for reason in reasons),
            f"an engine that has the GPUs the other way round is refused: {reasons}",
        )

    def serve(self, model: Path, **environment: str) -> None:
        """``wcache run -- vllm serve``, up to its first token, and its timeline."""
        command = [
            sys.executable, "-m", "wcache", "run", "--on-mismatch", "fail", "--timeline", "--",
            sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model),
            "--tensor-parallel-size", "2", "--max-model-len", "2048", "--enforce-eager",
            "--port", "18478", "--gpu-memory-utilization", "0.45",
        ]  # fmt: skip
        log = self.starts.work / "serve.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, text=True,
                env={**os.environ, **environment}, start_new_session=True,
            )  # fmt: skip
        try:
            deadline = time.time() + vllm_starts.START_S
            while "first token " not in log.read_text() and time.time() < deadline:
                if process.poll() is not None:
                    break
                time.sleep(0.2)
        finally:
            vllm_starts.end(process, signal.SIGTERM)
        own = re.findall(
            r"^(?:PHASE|imports|distributed|weights|- |profile|init|server|port|first token|hit|"
            r"CUDA_VIS|wcache|warning|error).*$", log.read_text(), re.MULTILINE,
        )  # fmt: skip
        print("\n".join(["  wcache run -- vllm serve:", *own]), flush=True)
        if not any(line.startswith("hit") for line in own):
            print(log.read_text()[-4000:], flush=True)
        self.expect(any(line.startswith("hit") for line in own), "wcache run ends in a hit")

    def load(self, model: Path) -> None:
        """wcache's own loader, no engine: each rank to its GPU, and one alone again."""
        before = gpu_memory()["used_mib"]
        began = time.time()
        self.up(model, CUDA_VISIBLE_DEVICES=IN_ORDER)
        print(f"  up --tp 2: {time.time() - began:.1f} s", flush=True)
        self.place(before, list(RANKS))
        kept = report(0)
        wcache("down", "1")
        began = time.time()
        wcache("up")
        again = report(1).serving
        self.expect(
            again is not None and again.how == "loaded" and report(0).pid == kept.pid,
            f"rank 1 alone is loaded again, in {time.time() - began:.1f} s",
        )
        self.verify()

    def load_as_vllm(self, model: Path) -> None:
        """vLLM's own loader, one process a rank that knows nothing of the other; then an engine."""
        try:
            began = time.time()
            self.up(model, "--loader", "vllm", CUDA_VISIBLE_DEVICES=IN_ORDER)
        except AssertionError as error:
            self.expect(False, f"up --loader vllm: {error}")
            print(wcache("logs", "0")[-3000:], flush=True)
            return
        print(f"  up --tp 2 --loader vllm: {time.time() - began:.1f} s", flush=True)
        row = self.starts.start("wcache, attaches to --loader vllm", model, "wcache", "eager")
        self.expect(row["outcomes"] == {"hit": 2}, f"both ranks attach: {row['outcomes']}")

    def from_cache(self, model: Path) -> None:
        """transformers over both ranks, which exchange their sums; beside one process."""
        self.up(model, "--dtype", "float32")
        work = self.starts.work
        command = [
            sys.executable, "-m", "wcache", "run", "--on-mismatch", "fail", "--",
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--local-addr", "127.0.0.1", "--nproc-per-node", "2",
            str(LOGITS), str(model), str(work),
        ]  # fmt: skip
        print(indented(said(command)), flush=True)
        alone = work / "alone.safetensors"
        print(indented(said([sys.executable, str(LOGITS), str(model), str(alone)])), flush=True)
        want = load_file(alone)["logits"]
        for rank in RANKS:
            found = load_file(work / f"{rank}.safetensors")["logits"]
            off = float((found - want).abs().max())
            largest = float(want.abs().max())
            self.expect(
                off < CLOSE * largest and bool((found.argmax(-1) == want.argmax(-1)).all()),
                f"rank {rank}: logits up to {largest:.1f} within {off:.1e} of one process's",
            )

    def expect(self, holds: bool, claim: str) -> None:
        self.starts.expect(holds, claim)


@contextlib.contextmanager
def moved_away(model: Path) -> Iterator[None]:
    """The checkpoint is not there for as long as the block."""
    away = model.with_name(f"{model.name}.away")
    model.rename(away)
    try:
        yield
    finally:
        away.rename(model)


def read_bytes(pid: int) -> int:
    """All that a process has read so far, from files and caches."""
    told = Path(f"/proc/{pid}/io").read_text()
    return int(dict(line.split(": ") for line in told.splitlines())["rchar"])


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


# --- attach -----------------------------------------------------------------------------------


@contextlib.contextmanager
def attachers() -> Iterator[list[Connection]]:
    """A fresh process for each rank, with a CUDA context; they end with the block."""
    context = multiprocessing.get_context("spawn")
    pipes = []
    for rank in RANKS:
        here, there = context.Pipe()
        context.Process(target=attach_one, args=(rank, there), daemon=True).start()
        pipes.append(here)
    for pipe in pipes:
        assert pipe.recv() == "ready"
    yield pipes
    for pipe in pipes:
        pipe.close()


def attach_s(pipes: Sequence[Connection], *, together: bool) -> float:
    """Seconds until both processes have their ranks."""
    began = time.perf_counter()
    for pipe in pipes:
        pipe.send("attach")
        if not together:
            assert pipe.recv() == "attached"
    if together:
        for pipe in pipes:
            assert pipe.recv() == "attached"
    seconds = time.perf_counter() - began
    for pipe in pipes:
        assert pipe.recv() == "closed"
    return seconds


def attach_one(rank: int, pipe: Connection) -> None:
    import torch

    from wcache.client import attach

    if torch.cuda.is_available():
        torch.zeros(1, device=f"cuda:{rank}")
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while pipe.recv() == "attach":
            with attach(rank=rank) as attachment:
                assert attachment.tensors
                pipe.send("attached")
            del attachment
            pipe.send("closed")


# --- all of it --------------------------------------------------------------------------------


def fp8(node: Node, _: Path, in_fp8: Path | None) -> None:
    if in_fp8 is not None:
        node.starts.start("disk, nothing compiled", in_fp8, "auto", "eager")
        node.starts.start("disk, page cache warm", in_fp8, "auto", "eager")
        node.publish_and_attach(in_fp8)
        for time_of_all in ("second", "third"):
            node.starts.start(f"wcache, attaches a {time_of_all} time", in_fp8, "wcache", "eager")
        wcache("down", "--force")


def stock(node: Node, model: Path, _: Path | None) -> None:
    node.stock(model)


def survive(node: Node, model: Path, _: Path | None) -> None:
    node.publish_and_attach(model)
    node.attach()
    node.verify()
    node.disturb(model)
    node.lose(model)
    node.serve(model)
    wcache("down", "--force")


def orders(node: Node, model: Path, _: Path | None) -> None:
    if node.device == "cuda":
        node.orders(model)
        node.serve(model)  # wcache run shows vllm the GPUs in the order of the ranks
        wcache("down", "--force")


def loaders(node: Node, model: Path, _: Path | None) -> None:
    node.load_as_vllm(model)
    wcache("down", "--force")
    node.load(model)
    wcache("down", "--force")


def transformers(node: Node, model: Path, _: Path | None) -> None:
    node.from_cache(model)
    wcache("down", "--force")


STAGES = {
    "fp8": fp8, "stock": stock, "survive": survive, "orders": orders, "loaders": loaders,
    "transformers": transformers,
}  # fmt: skip


def main(given: argparse.Namespace) -> int:
    with vllm_starts.workplace(given.result) as work:
        starts = Starts(work, tp=2)
        with starts.told(given.result):
            before = gpu_memory()["used_mib"]
            for stage in given.stages.split(","):
                STAGES[stage](Node(starts, given.device), given.model, given.fp8)
            starts.expect(is_free(before), f"the GPUs' memory is back: {before} MiB are in use")
    return starts.verdict()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Tensor parallel on two GPUs.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--fp8", type=Path, help="a checkpoint in FP8 to start as well")
    parser.add_argument("--stages", default=",".join(STAGES), help="which of all, in their order")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--result", type=Path, help="where rows go as JSON, and logs beside it")
    sys.exit(main(parser.parse_args()))
