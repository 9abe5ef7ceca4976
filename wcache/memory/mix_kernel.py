"""Sums of mixed words (:mod:`wcache.memory.digest`) by one CUDA kernel, in one pass over memory."""

import functools
import logging

import torch

from wcache.errors import WcacheError
from wcache.memory import driver
from wcache.memory.mixing import FIRST, SECOND, SHIFTS, STEP

log = logging.getLogger(__name__)

_THREADS = 256
# A block of threads takes this much of one run: enough for its start and its end to cost nothing,
# and few enough for the last blocks not to leave most of the GPU idle.
_BLOCK_BYTES = 256 << 10

# One launch takes any number of runs, as 20,000 launches would take longer than the memory does.
# Additions modulo 2**64 come to the same sum in whatever order blocks add theirs.
_SOURCE = f"""
typedef unsigned long long u64;

__device__ __forceinline__ u64 mixed(u64 x) {{
    x = (x ^ (x >> {SHIFTS[0]})) * {FIRST:#x}ull;
    x = (x ^ (x >> {SHIFTS[1]})) * {SECOND:#x}ull;
    return x ^ (x >> {SHIFTS[2]});
}}

__device__ u64 word(const unsigned char* bytes, unsigned count) {{
    u64 value = 0;
    for (unsigned i = 0; i < count; i++) value |= (u64)bytes[i] << (8 * i);
    return value;
}}

struct run {{ u64 address, nbytes, first_block; }};

extern "C" __global__ void __launch_bounds__({_THREADS})
mix64(const run* runs, const int* owners, u64* sums) {{
    const int owner = owners[blockIdx.x];
    const run all = runs[owner];
    const u64 start = (blockIdx.x - all.first_block) * {_BLOCK_BYTES}ull;
    const u64 left = all.nbytes - start;
    const unsigned nbytes = left < {_BLOCK_BYTES}ull ? (unsigned)left : {_BLOCK_BYTES}u;
    const unsigned words = nbytes / 8;
    const unsigned char* bytes = (const unsigned char*)(all.address + start);
    const u64 first = start / 8 * {STEP:#x}ull;
    u64 sum = 0;
    unsigned done = 0;
    if (all.address % 16 == 0) {{
        const ulonglong2* pairs = (const ulonglong2*)bytes;
        #pragma unroll 4
        for (unsigned i = threadIdx.x; i < words / 2; i += {_THREADS}u) {{
            const ulonglong2 pair = pairs[i];
            const u64 at = first + 2ull * i * {STEP:#x}ull;
            sum += mixed(pair.x + at) + mixed(pair.y + at + {STEP:#x}ull);
        }}
        done = words / 2 * 2;
    }}
    for (unsigned i = done + threadIdx.x; i < words; i += {_THREADS}u)
        sum += mixed(word(bytes + 8ull * i, 8) + first + i * {STEP:#x}ull);
    if (nbytes % 8 && threadIdx.x == 0)
        sum += mixed(word(bytes + 8ull * words, nbytes % 8) + first + words * {STEP:#x}ull);

    for (int lane = 16; lane; lane /= 2) sum += __shfl_down_sync(0xffffffffu, sum, lane);
    __shared__ u64 warps[{_THREADS // 32}];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {{
        for (unsigned warp = 1; warp < {_THREADS // 32}u; warp++) sum += warps[warp];
        atomicAdd(sums + owner, sum);
    }}
}}
"""


def sums(content: torch.Tensor, offsets: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor | None:
    """What :func:`wcache.memory.mixing.sums` returns, for the ``sizes`` bytes from ``offsets`` on.

    ``content`` is uint8[n] on a GPU; ``offsets`` and ``sizes``, in bytes, are int64[k] on the CPU,
    and must lie within it. None where the kernel can not be compiled. Beside the content, some 20
    bytes of GPU memory are used for each 256 KiB of it, and a KiB for each 32 spans.
    """
    device = content.device
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    kernel = compiled(ordinal)
    if kernel is None:
        return None
    blocks = (sizes + (_BLOCK_BYTES - 1)) // _BLOCK_BYTES
    ends = blocks.cumsum(0)
    table = torch.stack([offsets + content.data_ptr(), sizes, ends - blocks], dim=1).to(device)
    found = torch.zeros(len(sizes), dtype=torch.int64, device=device)
    if total := int(ends[-1]):
        # On the GPU: on the CPU torch wakes all of its threads for it, which took 8 ms for 20,000.
        numbers = torch.arange(len(sizes), dtype=torch.int32, device=device)
        owners = torch.repeat_interleave(numbers, blocks.to(device), output_size=total)
        driver.launch(
            kernel,
            ordinal,
            blocks=total,
            threads=_THREADS,
            stream=torch.cuda.current_stream(device).cuda_stream,
            addresses=[table.data_ptr(), owners.data_ptr(), found.data_ptr()],
        )
    return found.cpu()


@functools.cache
def compiled(ordinal: int) -> int | None:
    """The kernel for one GPU, compiled once in a process."""
    try:
        return driver.compile_kernel(_SOURCE, "mix64", ordinal)
    except WcacheError as error:
        log.debug("digests of cuda:%d are computed by torch operations: %s", ordinal, error.message)
        return None
