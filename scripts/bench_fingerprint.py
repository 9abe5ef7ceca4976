"""Measures what it costs to tell a checkpoint of a terabyte from every other.

    python scripts/bench_fingerprint.py [FOLDER] [SHARDS] [TENSORS] [GIGABYTES]

Makes a synthetic checkpoint in FOLDER (or a temporary one) whose files are sparse but for headers
and the blocks that are sampled, so that a terabyte takes about a gigabyte of disk and a cold read
still goes to the disk for every block. "Cold" is after the kernel was told to forget the files.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from wcache.checkpoint import Checkpoint, IdentityCache, identify, open_checkpoint
from wcache.checkpoint.identity import SAMPLE_BYTES

FORGET_S = 3.0  # more than a cache takes a file for one that may still be written to


def main(root: Path, shards: int, tensors: int, nbytes: int) -> None:
    model = root / "model"
    make(model, shards, tensors // shards, nbytes // shards)
    taken = sum(file.stat().st_blocks * 512 for file in model.iterdir())
    print(
        f"{shards} shards, {tensors} tensors, {nbytes / 1e12:.2f} TB, {taken / 1e9:.2f} GB on disk"
    )
    print(f"{'':40} {'seconds':>8} {'CPU s':>6} {'reads':>7} {'MB read':>8} {'MB disk':>8}")
    time.sleep(FORGET_S)
    checkpoint = open_checkpoint(model)
    for state in ("cold", "warm"):
        for label, work in (
            ("headers and index", lambda: open_checkpoint(model)),
            ("samples, one after the other", lambda: one_by_one(checkpoint)),
            ("samples, as wcache reads them", lambda: identify(checkpoint)),
        ):
            if state == "cold":
                forget(model)
            measured(f"{label}, {state}", work)
    cache = IdentityCache(root / "identity")
    checkpoint = open_checkpoint(model)
    cache.identify(checkpoint)
    measured("samples, from the cache", lambda: cache.identify(checkpoint))
    entry = next((root / "identity").iterdir())
    print(f"the cache's entry has {entry.stat().st_size / 1e3:.0f} kB")
    os.environ.update(
        WCACHE_RUN_DIR=str(root / "run"),
        WCACHE_CONFIG_DIR=str(root / "etc"),
        WCACHE_STATE_DIR=str(root / "state"),
    )
    forget(model)
    for state in ("cold", "again"):
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "wcache", "fingerprint", str(model), "--device", "cpu"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        print(f"{f'wcache fingerprint, {state}':40} {time.perf_counter() - began:8.3f}")


def make(folder: Path, shards: int, tensors: int, nbytes: int) -> None:
    """Writes ``shards`` files of ``nbytes`` with ``tensors`` each, unless they are there."""
    if folder.exists():
        return
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Synthetic"]}))
    weight_map: dict[str, str] = {}
    length = nbytes // tensors // 2 * 2
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        header = {}
        for tensor in range(tensors):
            title = f"model.layers.{shard}.mlp.experts.{tensor}.down_proj.weight"
            span = [tensor * length, (tensor + 1) * length]
            header[title] = {"dtype": "BF16", "shape": [length // 2], "data_offsets": span}
            weight_map[title] = name
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            base = file.tell()
            file.truncate(base + tensors * length)
            for tensor in range(tensors):
                file.seek(base + tensor * length + (length - SAMPLE_BYTES) // 2)
                file.write(os.urandom(min(SAMPLE_BYTES, length)))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def forget(folder: Path) -> None:
    """Drops the folder's files from the page cache."""
    os.sync()
    for file in folder.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def one_by_one(checkpoint: Checkpoint) -> None:
    """The reads alone, by a plain loop, for comparison; nothing is hashed."""
    fds = {
        file.name: os.open(checkpoint.path / file.name, os.O_RDONLY) for file in checkpoint.files
    }
    for entry in checkpoint.tensors.values():
        length = min(SAMPLE_BYTES, entry.nbytes)
        os.pread(fds[entry.file], length, entry.start + (entry.nbytes - length) // 2)
    for fd in fds.values():
        os.close(fd)


def measured(label: str, work: Callable[[], object]) -> None:
    before, cpu, began = counters(), time.process_time(), time.perf_counter()
    work()
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    spent = {name: value - before[name] for name, value in counters().items()}
    print(
        f"{label:40} {seconds:8.3f} {cpu_s:6.2f} {spent['syscr']:7}"
        f" {spent['rchar'] / 1e6:8.1f} {spent['read_bytes'] / 1e6:8.1f}",
        flush=True,
    )


def counters() -> dict[str, int]:
    """This process's reads (proc_pid_io(5))."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


if __name__ == "__main__":
    given = sys.argv[1:]
    sizes = [float(text) for text in given[1:]]
    sizes += [200, 100_000, 1000][len(sizes) :]
    target = Path(given[0]) if given else Path(tempfile.mkdtemp(prefix="wcache-bench-"))
    try:
        main(target, int(sizes[0]), int(sizes[1]), int(sizes[2] * 1e9))
    finally:
        if not given:
            shutil.rmtree(target)
