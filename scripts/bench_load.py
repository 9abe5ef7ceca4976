"""Reading a checkpoint into a rank's memory: wcache beside plain reads and the libraries.

    python scripts/bench_load.py [--device cpu|cuda] [--gib N] [--runs N] [--folder DIR] …

Makes a checkpoint of random bytes, sharded as save_pretrained does it, and reads it into a wcache
slab mapping, each way in a fresh process, in turn, with the files in the page cache and without.
The slabs are allocated before the clock starts, as a loader has them, so on the host nobody has
written to their pages yet; a CUDA context is there too. Prints medians in GB/s of the bytes that
are wanted, and as parts of the best plain read of the same run. What is not installed is said so.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

HIDDEN, INTERMEDIATE, KV = 4096, 14336, 1024
TP = 4
PLAIN = "plain"
WAYS = {
    "plain-2": "plain preadv, 2 threads",
    "plain-8": "plain preadv, 8 threads",
    "plain-16": "plain preadv, 16 threads",
    "plain-8-populated": "plain preadv, 8 threads, pages populated by each",
    "wcache": "wcache",
    "wcache-cached": "wcache, never past the page cache",
    "wcache-digested": "wcache, digests too",
    "load_file": "safetensors load_file + copy",
    "fastsafetensors": "fastsafetensors + copy",
    "runai": "runai-model-streamer + copy",
}
SHARDED = {
    "wcache-tp": f"wcache, rank 1 of tp {TP}",
    "wcache-tp-digested": f"wcache, rank 1 of tp {TP}, digests too",
    "slice-tp": f"safetensors get_slice + copy, rank 1 of tp {TP}",
}


def main() -> None:
    options = parse()
    if options.way:
        print(json.dumps(measure(options)))
        return
    own = options.folder is None
    folder = Path(tempfile.mkdtemp(prefix="wcache-bench-")) if own else Path(options.folder)
    try:
        model = folder / "model"
        if not model.exists():
            write_checkpoint(model, int(options.gib * 2**30), options.shards)
        report(options, model)
    finally:
        if own:
            shutil.rmtree(folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--gib", type=float, default=4.0, help="size of the checkpoint")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", help="where the checkpoint is made, and kept; else a temporary")
    parser.add_argument("--caches", default="warm,cold", help="of warm and cold, which")
    parser.add_argument("--ways", default=",".join([*WAYS, *SHARDED]), help="which to measure")
    parser.add_argument("--workers", type=int, help="of wcache; its own choice without")
    parser.add_argument("--chunk-mib", type=float, help="of wcache; its own choice without")
    parser.add_argument("--way", help=argparse.SUPPRESS)  # what a child process measures
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser.parse_args()


def report(options: argparse.Namespace, model: Path) -> None:
    files = sorted(model.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    caches = options.caches.split(",")
    if "cold" in caches and not drop(files):
        print("the page cache keeps the files here (tmpfs?): no cold reads", file=sys.stderr)
        caches.remove("cold")
    ways = options.ways.split(",")
    rates: dict[str, dict[str, list[float]]] = {way: {one: [] for one in caches} for way in ways}
    costs: dict[str, list[float]] = {way: [] for way in ways}
    seen: dict[str, set[str]] = {}
    absent: set[str] = set()
    for _ in range(options.runs):
        for cache in caches:
            for way in ways:
                if way in absent:
                    continue
                warm(files) if cache == "warm" else drop(files)
                found = child(options, way, model)
                if found is None:
                    absent.add(way)
                    continue
                rates[way][cache].append(found["bytes"] / found["s"] / 1e9)
                costs[way].append(found["cpu_s"] / found["bytes"] * 1e9)
                seen.setdefault(found["kind"], set()).add(found["digest"])
    print(f"\n{options.device}, {total / 2**30:.1f} GiB in {len(files)} files,"
          f" {os.cpu_count()} cores, medians of {options.runs}\n")  # fmt: skip
    table(rates, costs, caches)
    same = all(len(digests) == 1 for digests in seen.values())
    print(f"\nall of them wrote the same bytes: {same}")


def table(
    rates: dict[str, dict[str, list[float]]], costs: dict[str, list[float]], caches: list[str]
) -> None:
    heads = [head for cache in caches for head in (f"{cache}, GB/s", "of the best plain")]
    print("| | " + " | ".join([*heads, "CPU s/GB"]) + " |")
    print("|---|" + "---|" * (len(heads) + 1))
    medians = {
        way: {cache: statistics.median(found[cache]) for cache in caches if found[cache]}
        for way, found in rates.items()
    }
    plain_ways = [found for way, found in medians.items() if way.startswith(PLAIN)]
    for way, found in medians.items():
        cells = []
        for cache in caches:
            best = max((one[cache] for one in plain_ways if one), default=0.0)
            if not found:
                cells += ["not installed", ""]
                continue
            cells += [f"{found[cache]:.2f}", f"{found[cache] / best:.2f}" if best else ""]
        cells.append(f"{statistics.median(costs[way]):.2f}" if costs[way] else "")
        print(f"| {(WAYS | SHARDED)[way]} | " + " | ".join(cells) + " |")


def child(options: argparse.Namespace, way: str, model: Path) -> dict[str, Any] | None:
    """What a fresh process measured; None when the way's library is not installed there."""
    command = [sys.executable, __file__, "--way", way, "--model", str(model),
               "--device", options.device]  # fmt: skip
    for name in ("workers", "chunk_mib"):
        if getattr(options, name) is not None:
            command += ["--" + name.replace("_", "-"), str(getattr(options, name))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=900, check=True)
    found: dict[str, Any] | None = json.loads(done.stdout.splitlines()[-1])
    if found is not None:
        rate = found["bytes"] / found["s"] / 1e9
        print(f"{WAYS.get(way) or SHARDED[way]}: {rate:.2f} GB/s", file=sys.stderr, flush=True)
    return found


def measure(options: argparse.Namespace) -> dict[str, Any] | None:
    from wcache.checkpoint import open_checkpoint
    from wcache.layout import Layout
    from wcache.load.placement import place
    from wcache.memory.slab import Access, slab_sizes

    libraries = {"fastsafetensors": "fastsafetensors", "runai": "runai_model_streamer"}
    if options.way in libraries:
        import importlib.util

        if importlib.util.find_spec(libraries[options.way]) is None:
            return None
    checkpoint = open_checkpoint(Path(options.model))
    is_sharded = options.way in SHARDED
    layout = Layout(tp=TP) if is_sharded else Layout()
    plan = place(checkpoint, layout, 1 if is_sharded else 0,
                 parallel=parallel_plan() if is_sharded else None)  # fmt: skip
    memory = rank_memory(options.device)
    sizes = slab_sizes(plan.total_bytes, 1 << 30, memory.granularity)
    slabs = [memory.create(nbytes) for nbytes in sizes]
    mapping = memory.map(slabs, Access.WRITE)
    content = mapping.tensor()
    read = reader(options, checkpoint, plan, mapping, content)
    synchronize(options.device)
    began, worked = time.perf_counter(), time.process_time()
    read()
    synchronize(options.device)
    seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    kind = "plain" if options.way.startswith(PLAIN) else "sharded" if is_sharded else "whole"
    return {
        "s": seconds,
        "cpu_s": cpu,
        "bytes": plan.weight_bytes,
        "kind": kind,
        "digest": proof(plan, content),
    }


def rank_memory(device: str) -> Any:
    from wcache.memory import open_memory

    if device == "cpu":
        return open_memory("cpu")
    import torch

    from wcache.machine.devices import visible_gpus

    torch.zeros(1, device="cuda")  # the context is there before the clock starts
    return open_memory("cuda", device_uuid=visible_gpus()[0].uuid)


def synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def proof(plan: Any, content: Any) -> str:
    """A digest of what was read, so that a way that is fast because it is wrong is seen."""
    from wcache.memory.digest import digests

    return "".join(digests(content, list(plan.spans)))[:4096]


def reader(
    options: argparse.Namespace, checkpoint: Any, plan: Any, mapping: Any, content: Any
) -> Callable[[], Any]:
    """What is measured, with everything imported that it needs."""
    way = options.way
    if way.startswith("wcache"):
        from wcache.load.publish import digested
        from wcache.load.read import read_plan

        chunk = int(options.chunk_mib * 2**20) if options.chunk_mib else None

        def run() -> None:
            found = read_plan(
                checkpoint, plan, mapping, lambda _: None, workers=options.workers,
                chunk_bytes=chunk, digested="digested" in way, shared="cached" in way,
            )  # fmt: skip
            if "digested" in way:
                digested(content, [one for one in plan.spans if one not in found], lambda _: None)

        return run
    files = [checkpoint.path / file.name for file in checkpoint.files]
    if way.startswith(PLAIN):
        _, threads, *more = way.split("-")
        return lambda: plain(files, content, mapping, int(threads), bool(more))
    places = dict(views(plan, content))
    ways = {"load_file": load_file, "fastsafetensors": fastsafetensors, "runai": runai,
            "slice-tp": get_slice}  # fmt: skip
    if way == "slice-tp":
        slices = {target.name: target.slice for target in plan.targets}
        return lambda: get_slice(files, places, slices)
    return lambda: ways[way](files, places, options.device)


def views(plan: Any, content: Any) -> Iterator[tuple[str, Any]]:
    from wcache.memory.dtypes import TORCH_DTYPES

    for target in plan.targets:
        part = content[target.offset : target.offset + target.nbytes]
        yield target.name, part.view(TORCH_DTYPES[target.dtype]).view(target.shape)


def plain(
    files: list[Path], content: Any, mapping: Any, threads: int, populated: bool = False
) -> None:
    """Whole files, back to back: what the machine gives when nobody asks what is in them."""
    import torch

    step = 16 << 20
    tasks: SimpleQueue[tuple[int, int, int, int] | None] = SimpleQueue()
    fds = [os.open(file, os.O_RDONLY) for file in files]
    to = 0
    for fd in fds:
        nbytes = min(os.fstat(fd).st_size, content.numel() - to)
        for start in range(0, nbytes, step):
            tasks.put((fd, start, to + start, min(step, nbytes - start)))
        to += nbytes

    def host() -> None:
        view = mapping.buffer()
        while (task := tasks.get()) is not None:
            fd, start, place, nbytes = task
            if populated:
                mapping.populate(place, nbytes)
            done = 0
            while done < nbytes:
                done += os.preadv(fd, [view[place + done : place + nbytes]], start + done)

    def gpu() -> None:
        slots = [torch.empty(step, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        stream = torch.cuda.Stream()
        events = [torch.cuda.Event(blocking=True) for _ in slots]
        turn = 0
        while (task := tasks.get()) is not None:
            fd, start, place, nbytes = task
            turn = 1 - turn
            events[turn].synchronize()
            done, view = 0, memoryview(slots[turn].numpy())
            while done < nbytes:
                done += os.preadv(fd, [view[done:nbytes]], start + done)
            with torch.cuda.stream(stream):
                content[place : place + nbytes].copy_(slots[turn][:nbytes], non_blocking=True)
                events[turn].record(stream)
        stream.synchronize()

    crew = [threading.Thread(target=gpu if content.is_cuda else host) for _ in range(threads)]
    for _ in crew:
        tasks.put(None)
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()


def load_file(files: list[Path], places: dict[str, Any], device: str) -> None:
    import safetensors.torch

    for file in files:
        for name, tensor in safetensors.torch.load_file(file, device=device).items():
            places[name].copy_(tensor)


def fastsafetensors(files: list[Path], places: dict[str, Any], device: str) -> None:
    import fastsafetensors as library

    # Without GPUDirect Storage, which neither a virtual machine nor a page cache has.
    place = "cuda:0" if device == "cuda" else "cpu"
    loader = library.SafeTensorsFileLoader(None, device=place, nogds=True)
    loader.add_filenames({0: [str(file) for file in files]})
    buffers = loader.copy_files_to_device()
    for name, to in places.items():
        to.copy_(buffers.get_tensor(name))
    buffers.close()
    loader.close()


def runai(files: list[Path], places: dict[str, Any], device: str) -> None:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        place = "cuda:0" if device == "cuda" else "cpu"
        streamer.stream_files([str(file) for file in files], device=place)
        for name, tensor in streamer.get_tensors():
            places[name].copy_(tensor)


def get_slice(files: list[Path], places: dict[str, Any], slices: dict[str, Any]) -> None:
    import safetensors

    for file in files:
        with safetensors.safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                part = slices[name]
                if part is None:
                    places[name].copy_(opened.get_tensor(name))
                    continue
                index = (slice(None),) * part.dim + (slice(part.start, part.stop),)
                places[name].copy_(opened.get_slice(name)[index])


def parallel_plan() -> Any:
    """A Llama's."""
    from wcache.load.parallel import ParallelPlan

    colwise = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj",
               "mlp.up_proj")  # fmt: skip
    styles = dict.fromkeys(colwise, "colwise")
    styles |= dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), "rowwise")
    return ParallelPlan(
        architecture="LlamaForCausalLM", prefix="model",
        base={f"layers.*.{name}": style for name, style in styles.items()},
        attention_heads=(32,), kv_heads=(8,),
    )  # fmt: skip


def write_checkpoint(folder: Path, nbytes: int, shards: int) -> None:
    """As many layers of a Llama of 8B as ``nbytes`` hold, in bf16."""
    shapes = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV, HIDDEN),
        "self_attn.v_proj": (KV, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    layer_bytes = sum(
        2 * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values()
    )
    layers = max(shards, nbytes // layer_bytes)
    folder.mkdir(parents=True)
    print(f"making {layers} layers, {layers * layer_bytes / 2**30:.1f} GiB, in {folder}",
          file=sys.stderr, flush=True)  # fmt: skip
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for shard in range(shards):
        names = {
            f"model.layers.{layer}.{name}.weight": shape
            for layer in range(layers * shard // shards, layers * (shard + 1) // shards)
            for name, shape in shapes.items()
        }
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        write_shard(folder / file, names)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        nbytes = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # A block that is no multiple of any tensor: each has bytes of its own.
    block = os.urandom((8 << 20) + 72)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for done in range(0, end, len(block)):
            file.write(block[: end - done])
        file.flush()
        os.fsync(file.fileno())


def warm(files: list[Path]) -> None:
    buffer = bytearray(16 << 20)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def drop(files: list[Path]) -> bool:
    """Puts the files out of the page cache; False where they can not be."""
    for _ in range(20):
        if not any(is_cached(file) for file in files):
            return True
        # What another thread is about to read, or has just read, stays where it is at first.
        time.sleep(0.1)
    return False


def is_cached(file: Path) -> bool:
    """Drops ``file``, and looks at 64 bytes of it."""
    fd = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # a look is no reason to read ahead
        nbytes = os.fstat(fd).st_size
        found = 0
        for part in range(64):
            try:
                found += os.preadv(fd, [bytearray(1)], nbytes * part // 64, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
            except OSError:  # tmpfs, for one, can not tell
                return True
        return found > 0
    finally:
        os.close(fd)


if __name__ == "__main__":
    main()
