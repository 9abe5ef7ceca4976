"""What the loader writes is bit for bit what safetensors and torch would have made of it."""

import os
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.checkpoints import llama_tensors, write_checkpoint, write_llama
from tests.loading import EMBEDDING, LLAMA
from tests.reading import Elsewhere
from wcache.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from wcache.errors import CheckpointError
from wcache.layout import Layout
from wcache.load.placement import place
from wcache.load.plan import Part, Plan, Slice, lay_out
from wcache.load.read import read_plan
from wcache.load.reading.pieces import pieces
from wcache.manifest import DTYPE_BYTES
from wcache.memory import open_memory
from wcache.memory.digest import digest
from wcache.memory.dtypes import TORCH_DTYPES
from wcache.memory.slab import Access, slab_sizes

pytestmark = pytest.mark.unit

# The smallest one that is allowed, and ones that do and do not divide rows.
CHUNKS = [8, 24, 1000, 4096, 16 << 20]


def loaded(checkpoint: Checkpoint, planned: Plan, chunk_bytes: int) -> dict[str, torch.Tensor]:
    """Reads ``planned`` into real host slabs; the tensors of it, as copies.

    Digests that were computed on the way are those of the bytes.
    """
    memory = open_memory("cpu")
    sizes = slab_sizes(planned.total_bytes, 2 << 20, memory.granularity)
    slabs = [memory.create(nbytes) for nbytes in sizes]
    mapping = memory.map(slabs, Access.WRITE)
    seen = [0]
    try:
        digests = read_plan(checkpoint, planned, mapping, seen.append, chunk_bytes=chunk_bytes)
        content = mapping.tensor()
        for (offset, nbytes), found_digest in digests.items():
            assert found_digest == digest(content[offset : offset + nbytes])
        if chunk_bytes % 64 == 0:  # every other tensor is digested on its way
            assert all(span in digests for span in planned.spans)
        found = {
            target.name: content[target.offset : target.offset + target.nbytes]
            .clone()
            .view(TORCH_DTYPES[target.dtype])
            .reshape(target.shape)
            for target in planned.targets
        }
    finally:
        mapping.close()
        for slab in slabs:
            slab.close()
    assert seen == sorted(seen)
    assert seen[-1] == planned.weight_bytes
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal as bits, so that NaN is itself and -0.0 is not 0.0."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and bits(one) == bits(other)


def converted_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal as bits, but for the payload of a NaN.

    torch's own vectorised and scalar conversions differ in that, so it depends on where in a tensor
    a value stands.
    """
    nan = one.isnan()
    return torch.equal(nan, other.isnan()) and same(one[~nan], other[~nan])


def every_dtype() -> dict[str, torch.Tensor]:
    """Tensors of each dtype with any bits at all (bools aside), and the odd shapes of one."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, dtype in TORCH_DTYPES.items():
        if name == "F8_E8M0":
            continue  # safetensors' torch reader does not know it
        top = 2 if dtype == torch.bool else 256
        raw = torch.randint(0, top, (5 * 7 * dtype.itemsize,), generator=generator)
        tensors[name] = raw.to(torch.uint8).view(dtype).reshape(5, 7)
    tensors["scalar"] = torch.tensor(2.5, dtype=torch.bfloat16)
    tensors["empty"] = torch.empty(3, 0, 2, dtype=torch.float16)
    tensors["deep"] = torch.randn(2, 3, 4, 5, generator=generator)
    return tensors


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_every_dtype_and_shape_comes_over_unchanged(tmp_path: Path, chunk_bytes: int) -> None:
    path = write_checkpoint(tmp_path / "m", every_dtype(), shards=2)
    checkpoint = open_checkpoint(path)
    expected: dict[str, torch.Tensor] = {}
    for file in checkpoint.files:
        expected |= load_file(path / file.name)
    found = loaded(checkpoint, place(checkpoint, Layout(), 0), chunk_bytes)
    assert found.keys() == expected.keys()
    assert [name for name in found if not same(found[name], expected[name])] == []


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_conversion_is_that_of_torch(tmp_path: Path, dtype: str, chunk_bytes: int) -> None:
    tensors = every_dtype()
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", tensors))
    found = loaded(checkpoint, place(checkpoint, Layout(), 0, dtype=dtype), chunk_bytes)
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    for name, tensor in tensors.items():
        expected = tensor.to(TORCH_DTYPES[dtype]) if tensor.dtype in floats else tensor
        alike = converted_alike if tensor.dtype in floats else same
        assert alike(found[name], expected), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk_bytes", [24, 16 << 20])
def test_shards_of_tp_3_put_together_are_the_checkpoint(
    tmp_path: Path, tied: bool, chunk_bytes: int
) -> None:
    path = write_llama(tmp_path / "m", tie_word_embeddings=tied)
    checkpoint = open_checkpoint(path)
    whole = load_file(path / "model.safetensors")
    if tied:
        whole["lm_head.weight"] = whole[EMBEDDING]
    plans = [
        place(checkpoint, Layout(tp=3), rank, parallel=LLAMA, tied=EMBEDDING if tied else None)
        for rank in range(3)
    ]
    ranks = [loaded(checkpoint, planned, chunk_bytes) for planned in plans]
    dims = {target.name: target.slice.dim if target.slice else None for target in plans[0].targets}

    assert dims.keys() == whole.keys()
    assert set(dims.values()) == {None, 0, 1}
    for name, dim in dims.items():
        parts = [rank[name] for rank in ranks]
        if dim is None:
            assert all(same(part, whole[name]) for part in parts), name
        else:
            assert same(torch.cat(parts, dim), whole[name]), name


def test_sharding_and_conversion_at_once(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m", llama_tensors(dtype=torch.float32))
    checkpoint = open_checkpoint(path)
    planned = place(checkpoint, Layout(tp=3), 1, dtype="BF16", parallel=LLAMA, tied=EMBEDDING)
    name = "model.layers.1.mlp.down_proj.weight"
    expected = load_file(path / "model.safetensors")[name][:, 32:64].to(torch.bfloat16)
    for chunk_bytes in CHUNKS:
        assert same(loaded(checkpoint, planned, chunk_bytes)[name], expected)


@pytest.mark.parametrize("dtype", [None, "F16"])
def test_staged_bytes_are_those_that_are_read_directly(tmp_path: Path, dtype: str | None) -> None:
    checkpoint = open_checkpoint(write_llama(tmp_path / "m"))
    planned = place(checkpoint, Layout(tp=3), 1, dtype=dtype, parallel=LLAMA, tied=EMBEDDING)
    direct = loaded(checkpoint, planned, 1000)
    staged = Elsewhere(planned.total_bytes)
    read_plan(checkpoint, planned, staged, lambda _: None, chunk_bytes=1000)
    for target in planned.targets:
        content = staged.content[target.offset : target.offset + target.nbytes]
        assert content.equal(direct[target.name].reshape(-1).view(torch.uint8))


def test_weights_may_cross_from_slab_to_slab(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(700, 1000), "b": torch.randn(900, 1000)}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", tensors))
    found = loaded(checkpoint, place(checkpoint, Layout(), 0), 16 << 20)
    assert all(same(found[name], tensor) for name, tensor in tensors.items())


@st.composite
def sliced(draw: st.DrawFn) -> tuple[tuple[int, ...], Slice | None, str]:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    dtype = draw(st.sampled_from(["U8", "BF16", "F32", "F64"]))
    if draw(st.booleans()):
        return shape, None, dtype
    dim = draw(st.integers(0, len(shape) - 1))
    start = draw(st.integers(0, shape[dim]))
    return shape, Slice(dim, start, draw(st.integers(start, shape[dim]))), dtype


@given(case=sliced(), chunk=st.integers(1, 60))
@settings(suppress_health_check=[HealthCheck.differing_executors])
def test_pieces_gather_exactly_the_slice(
    case: tuple[tuple[int, ...], Slice | None, str], chunk: int
) -> None:
    shape, part, dtype = case
    item = DTYPE_BYTES[dtype]
    nbytes = prod(shape) * item
    start = 24
    entry = TensorEntry(file="f", dtype=dtype, shape=shape, start=start, nbytes=nbytes)
    (target,) = lay_out([Part("x", entry, dtype, part)]).targets
    data = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    whole = data.reshape(*shape, item)
    expected = whole if part is None else whole.narrow(part.dim, part.start, part.stop - part.start)

    gathered: list[int] = []
    for piece in pieces(target, chunk * 8):
        assert piece.place == target.offset + len(gathered)
        assert 0 < piece.read_bytes <= chunk * 8
        assert start <= piece.start
        assert piece.start + piece.read_bytes <= start + nbytes
        first = piece.start - start
        rows = data[first : first + piece.read_bytes].view(piece.rows, piece.row_bytes)
        gathered += rows[:, piece.skip : piece.skip + piece.width].reshape(-1).tolist()
    assert gathered == expected.reshape(-1).tolist()


def test_a_file_that_shrank_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_llama(tmp_path / "m"))
    file = checkpoint.path / "model.safetensors"
    # As if it happened between the look at its size and the read.
    os.truncate(file, file.stat().st_size - 4096)
    status = file.stat()
    stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    changed = replace(checkpoint, files=(replace(checkpoint.files[0], stamp=stamp),))
    with pytest.raises(CheckpointError) as caught:
        loaded(changed, place(changed, Layout(), 0), 16 << 20)
    assert caught.value.message == f"{file} shrank while it was read"


def test_a_file_that_is_written_while_it_is_read_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_llama(tmp_path / "m"))
    file = checkpoint.path / "model.safetensors"
    planned = place(checkpoint, Layout(), 0)
    memory = open_memory("cpu")
    slab = memory.create(memory.granularity)
    mapping = memory.map([slab], Access.WRITE)

    def overwrite(done: int) -> None:
        os.utime(file, ns=(1, 1))

    with pytest.raises(CheckpointError, match="changed while it was read"):
        read_plan(checkpoint, planned, mapping, overwrite)
    mapping.close()
    slab.close()
