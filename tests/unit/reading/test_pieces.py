"""How rows are read, and weights that are quantized on their way."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import write_checkpoint
from tests.reading import Elsewhere
from wcache.checkpoint import TensorEntry, open_checkpoint
from wcache.fp8 import BLOCK
from wcache.load.plan import Part, Plan, Slice, lay_out
from wcache.load.quantize import quantize_into
from wcache.load.read import read_plan
from wcache.load.reading.pieces import begin_with_words, pieces
from wcache.memory.host import HostMapping

pytestmark = pytest.mark.unit

MIB = 1 << 20


def quantized(source: TensorEntry, part: Slice | None) -> Plan:
    """A plan of one weight that becomes FP8."""
    return lay_out([Part("w", source, source.dtype, part, is_quantized=True)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("part", [None, Slice(0, 128, 384), Slice(1, 256, 512)])
@pytest.mark.parametrize("chunk_bytes", [64, 256 << 10, 4 << 20])
@pytest.mark.parametrize("on_host", [True, False])
def test_a_weight_that_is_quantized_on_its_way_is_the_whole_one_quantized(
    tmp_path: Path, mapping: HostMapping,
    dtype: torch.dtype, part: Slice | None, chunk_bytes: int, on_host: bool,
) -> None:  # fmt: skip
    whole = torch.randn(512, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", {"w": whole}))
    planned = quantized(checkpoint.tensors["w"], part)
    (target,) = planned.targets
    assert target.scale is not None
    to = mapping if on_host else Elsewhere(planned.total_bytes)
    seen: list[int] = []
    assert read_plan(checkpoint, planned, to, seen.append, chunk_bytes=chunk_bytes) == {}
    assert seen[-1] == planned.weight_bytes == target.nbytes + target.scale.nbytes

    mine = whole if part is None else whole.narrow(part.dim, part.start, part.stop - part.start)
    weight = torch.empty(target.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty(target.scale.shape)
    quantize_into(mine, weight, scale)
    content = to.tensor()
    found = content[target.offset : target.offset + target.nbytes]
    assert found.equal(weight.view(torch.uint8).view(-1))
    scales = content[target.scale.offset : target.scale.offset + target.scale.nbytes]
    assert scales.equal(scale.view(torch.uint8).view(-1))


@pytest.mark.parametrize("part", [None, Slice(0, 256, 640), Slice(1, 0, 384)])
@pytest.mark.parametrize("chunk_bytes", [8, 300 << 10, 64 << 20])
def test_pieces_of_a_weight_that_is_quantized_part_no_block(
    part: Slice | None, chunk_bytes: int
) -> None:
    entry = TensorEntry(file="f", dtype="BF16", shape=(896, 768), start=8, nbytes=896 * 768 * 2)
    (target,) = quantized(entry, part).targets
    found = list(pieces(target, chunk_bytes))
    assert sum(piece.rows for piece in found) == target.shape[0]
    for piece in found:
        assert piece.rows % BLOCK == 0
        assert piece.width == target.shape[1] * 2
        assert (piece.place - target.offset) % (BLOCK * target.shape[1]) == 0


# How rows are read


def column(row_bytes: int, width: int, rows: int = 64) -> list[tuple[int, int]]:
    """(rows, bytes read) of the pieces of a column of bytes."""
    entry = TensorEntry(
        file="f", dtype="U8", shape=(rows, row_bytes), start=0, nbytes=rows * row_bytes
    )
    (target,) = lay_out([Part("x", entry, "U8", Slice(1, 0, width))]).targets
    found = list(pieces(target))
    assert begin_with_words(found)
    return [(piece.rows, piece.read_bytes) for piece in found]


def test_rows_are_read_whole_where_what_is_skipped_is_small() -> None:
    assert column(8192, 1024) == [(64, 64 * 8192)]
    assert column(65536, 8192, 512) == [(256, 16 * MIB), (256, 16 * MIB)]
    assert column(128 << 10, 32 << 10) == [(1, 32 << 10)] * 64
