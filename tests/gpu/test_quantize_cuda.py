"""A GPU makes the same FP8 weights as the CPU."""

import pytest
import torch

from wcache.load.quantize import quantize_into
from wcache.memory import driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not driver.driver_available(), reason="no NVIDIA driver"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("exponent", [-20, -5, 4])
def test_weights_and_scales_are_those_of_the_cpu(dtype: torch.dtype, exponent: int) -> None:
    generator = torch.Generator().manual_seed(exponent + 99)
    # More than one band of rows, and one block of zeros.
    source = torch.randn(4096, 8192, generator=generator) * 2.0**exponent
    source[:128, :128] = 0
    source = source.to(dtype)
    made = {}
    for device in ("cpu", "cuda"):
        weight = torch.empty(source.shape, dtype=torch.float8_e4m3fn, device=device)
        scale = torch.empty(32, 64, device=device)
        quantize_into(source.to(device), weight, scale)
        made[device] = (weight.cpu().view(torch.uint8), scale.cpu().view(torch.int32))
    assert torch.equal(made["cpu"][1], made["cuda"][1])
    assert torch.equal(made["cpu"][0], made["cuda"][0])
