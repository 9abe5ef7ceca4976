"""Quantizing to FP8 is transformers' own arithmetic, bit for bit, and does not depend on shards."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wcache.load import quantize
from wcache.load.quantize import dequantized, quantize_into

pytestmark = pytest.mark.unit

FP8 = torch.float8_e4m3fn
FLOATS = [torch.bfloat16, torch.float16, torch.float32]


def quantized(source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = source.shape
    # NaN and a signalling value wherever nothing is written.
    weight = torch.full((rows, columns), 0x7F, dtype=torch.uint8).view(FP8)
    scale = torch.full((rows // 128, columns // 128), torch.nan)
    before = source.clone()
    quantize_into(source, weight, scale)
    assert torch.equal(source.view(torch.uint8), before.view(torch.uint8))
    return weight, scale


def reference(source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers makes of it."""
    transformers = pytest.importorskip("transformers")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    holder = SimpleNamespace(quantization_config=transformers.FineGrainedFP8Config())
    found = fp8.Fp8Quantize(holder).convert({"x.weight": source})
    return found["x.weight"], found["x.weight_scale_inv"]


def same(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return (
        one[0].dtype == other[0].dtype == FP8
        and torch.equal(one[0].view(torch.uint8), other[0].view(torch.uint8))
        and one[1].dtype == other[1].dtype == torch.float32
        and torch.equal(one[1].view(torch.int32), other[1].view(torch.int32))
    )


@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    dtype=st.sampled_from(FLOATS),
    exponent=st.integers(-20, 4),
    seed=st.integers(0, 2**30),
)
@settings(max_examples=40, deadline=None)
def test_weights_are_those_of_transformers(
    rows: int, columns: int, dtype: torch.dtype, exponent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(rows * 128, columns * 128, generator=generator)
    # Blocks of very different sizes, and one of zeros.
    source *= torch.logspace(-2, 2, columns, base=2.0).repeat_interleave(128) * 2.0**exponent
    source[:128, :128] *= seed % 2
    assert same(quantized(source.to(dtype)), reference(source.to(dtype)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_are_quantized_alike(dtype: torch.dtype, tp: int, dim: int) -> None:
    """Slice, then quantize equals quantize, then slice."""
    source = torch.randn(512, 512, generator=torch.Generator().manual_seed(5)).to(dtype)
    weight, scale = quantized(source)
    for part, *whole in zip(*(t.chunk(tp, dim) for t in (source, weight, scale)), strict=True):
        assert same(quantized(part), (whole[0], whole[1]))


@pytest.mark.parametrize("band_bytes", [1, 128 * 384 * 4 * 3, 1 << 30])
def test_bands_of_rows_are_quantized_alike(
    band_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = torch.randn(1280, 384, generator=torch.Generator().manual_seed(6))
    expected = quantized(source)
    monkeypatch.setattr(quantize, "_CPU_BAND_BYTES", band_bytes)
    assert same(quantized(source), expected)


def test_a_block_of_zeros_has_the_scale_1() -> None:
    weight, scale = quantized(torch.zeros(128, 128))
    assert scale.tolist() == [[1.0]]
    assert weight.view(torch.uint8).count_nonzero() == 0


def test_a_block_of_next_to_nothing_becomes_zeros() -> None:
    """Where 448 / its largest value is no float32 any more, and 0 times that no number."""
    source = torch.zeros(128, 128)
    source[0, 0] = 1e-38
    weight, scale = quantized(source)
    assert scale.tolist() == [[1.0]]
    assert weight.float().count_nonzero() == 0
    assert weight.isnan().sum() == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_shows_in_the_scale_of_its_block_alone(value: float) -> None:
    source = torch.randn(256, 256)
    source[130, 3] = value
    _, scale = quantized(source)
    assert scale.isfinite().tolist() == [[True, True], [False, True]]


def test_the_largest_value_is_kept_nearly_exactly() -> None:
    source = torch.randn(256, 256, generator=torch.Generator().manual_seed(7))
    back = dequantized(*quantized(source), torch.float32)
    at = source.abs().argmax()
    assert torch.isclose(back.view(-1)[at], source.view(-1)[at], rtol=1e-6)
    assert (back - source).abs().max() <= source.abs().max() * 2**-4


def test_cut_blocks_are_dequantized_with_their_scales() -> None:
    weight = torch.ones(130, 200).to(FP8)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    back = dequantized(weight, scale, torch.bfloat16)
    assert back.dtype == torch.bfloat16
    corners = [back[0, 0], back[127, 199], back[129, 127], back[128, 128]]
    assert [corner.item() for corner in corners] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("source", "weight", "scale"),
    [
        ((100, 128), (100, 128), (1, 1)),
        ((128, 100), (128, 100), (1, 1)),
        ((128, 128), (128, 256), (1, 1)),
        ((256, 128), (256, 128), (1, 2)),
    ],
)
def test_shapes_that_do_not_fit_are_a_bug(
    source: tuple[int, int], weight: tuple[int, int], scale: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match=r"\["):
        quantize_into(torch.ones(source), torch.ones(weight).to(FP8), torch.ones(scale))
