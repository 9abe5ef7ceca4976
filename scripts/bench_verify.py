"""Shows how fast digests are computed beside a plain copy of the same bytes, on a GPU or the CPU.

    python scripts/bench_verify.py [--device cuda|cpu] [--gib 1,4,16,32] [--storages 1,20000]

The copy is within the device and counted as the bytes copied, once; a digest reads as many. What
is timed is all that ``wcache verify`` waits for: Python, the launch, the kernel and the way back of
the sums. GB are 10^9 bytes. ``torch`` is what digests on a GPU fall back to where no kernel can be
compiled; on the CPU it is how they are computed.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from wcache.memory import mix_kernel, mixing
from wcache.memory.digest import digest, digests

ALIGNMENT = 256
# What torch's operations are given: at 20 times the time, all of it would take minutes.
TORCH_BYTES = 1 << 30


def main() -> None:
    args = arguments()
    print(f"torch {torch.__version__}, {name_of(args.device)}, {args.repeat} repetitions each")
    check(args.device)
    print("    size  storages what      GB/s median    least     most  of copy")
    for gib in args.gib:
        measure(args.device, int(gib * (1 << 30)) // 8 * 8, args.storages, args.repeat)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    parser.add_argument("--gib", type=numbers(float), help="sizes, such as 1,4,16,32")
    parser.add_argument("--storages", type=numbers(int), default=[1, 20_000])
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    args.gib = args.gib or ([1, 4, 16, 32] if args.device == "cuda" else [1])
    return args


def numbers(kind: type) -> Callable[[str], list[float]]:
    return lambda text: [kind(part) for part in text.split(",")]


def name_of(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


def check(device: str) -> None:
    """All ways come to one digest, or no figure below means anything."""
    if device == "cuda" and mix_kernel.compiled(torch.cuda.current_device()) is None:
        sys.exit("the kernel can not be compiled here: digests are torch's operations")
    data = torch.randint(0, 256, ((8 << 20) + 3,), dtype=torch.uint8)
    there = data.to(device)
    found = {digest(data), digest(there), digest(there, chunk_bytes=1 << 20)}
    if len(found) != 1:
        sys.exit(f"digests differ: {found}")


def measure(device: str, nbytes: int, counts: list[int], repeat: int) -> None:
    data = torch.empty(nbytes, dtype=torch.uint8, device=device)
    data.view(torch.int64).random_()
    copied = row(device, nbytes, 1, "copy", copy_of(data), repeat, None)
    for count in counts:
        each = nbytes // count // ALIGNMENT * ALIGNMENT
        if each:
            spans = [(start, each) for start in range(0, each * count, each)]
            total = each * count
            row(
                device, total, count, "digest", lambda spans=spans: digests(data, spans), repeat,
                copied,
            )  # fmt: skip
    if device == "cpu":
        return
    few = data[:TORCH_BYTES]
    row(device, len(few), 1, "torch", lambda: mixing.sums(few, [(0, len(few))]), repeat, copied)


def copy_of(data: torch.Tensor) -> Callable[[], object]:
    target = torch.empty_like(data)
    return lambda: target.copy_(data)


def row(
    device: str,
    nbytes: int,
    count: int,
    what: str,
    work: Callable[[], object],
    repeat: int,
    copied: float | None,
) -> float:
    """Prints one line; returns the median in GB/s."""
    seconds(device, work)  # buffers are made, the kernel is compiled
    rates = sorted(nbytes / seconds(device, work) / 1e9 for _ in range(repeat))
    median = statistics.median(rates)
    ratio = f"{median / copied:8.2f}" if copied else f"{'-':>8}"
    print(
        f"{nbytes / (1 << 30):>4.1f} GiB {count:>9} {what:<8} {median:>12.2f} {rates[0]:>8.2f}"
        f" {rates[-1]:>8.2f} {ratio}",
        flush=True,
    )
    return median


def seconds(device: str, work: Callable[[], object]) -> float:
    synchronize(device)
    begun = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begun


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
