"""Quantizes weights to block-wise FP8 as they are loaded, bit for bit as transformers does it."""

import torch

from wcache.fp8 import BLOCK

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
# Of a band of rows in float32: what is held at once beside source and result is a few of these. On
# a CPU they should stay in its cache: 8 MiB were four times as fast as 64 MiB.
_CPU_BAND_BYTES = 8 << 20
_CUDA_BAND_BYTES = 64 << 20


@torch.no_grad()
def quantize_into(source: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Writes ``source`` as FP8 into ``weight``, and the scales of its blocks into ``scale``.

    ``source`` is any float ``[rows, columns]`` with both multiples of 128, and stays as it is;
    ``weight`` is float8_e4m3fn of the same shape, ``scale`` float32
    ``[rows / 128, columns / 128]``; all on one device. ``weight * scale``, block by block, is about
    ``source``.

    The arithmetic is that of Fp8Quantize in transformers' integrations/finegrained_fp8.py, in
    float32: a block's largest magnitude becomes 448. Two kinds of blocks differ from it. One whose
    largest magnitude is below 448 / 3.4e38, where it gets NaN from 0 * infinity, becomes zeros with
    the scale 1. The scale of one with a value that is not finite is not finite, so that whoever
    called can refuse it (:func:`wcache.load.job.check_scales`). Raises :class:`ValueError` for
    shapes that do not fit together.
    """
    rows, columns = source.shape
    if rows % BLOCK or columns % BLOCK or weight.shape != source.shape:
        raise ValueError(
            f"a weight {list(source.shape)} can not become {list(weight.shape)} in FP8"
        )
    if tuple(scale.shape) != (rows // BLOCK, columns // BLOCK):
        raise ValueError(f"scales {list(scale.shape)} are not those of {list(source.shape)}")
    if not source.numel():
        return
    band_bytes = _CUDA_BAND_BYTES if source.is_cuda else _CPU_BAND_BYTES
    step = max(band_bytes // (4 * columns * BLOCK), 1) * BLOCK
    for row in range(0, rows, step):
        band = slice(row, row + step)
        blocks = slice(row // BLOCK, (row + step) // BLOCK)
        _quantize_band(source[band], weight[band], scale[blocks])


def _quantize_band(source: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    rows, columns = scale.shape
    tiled = source.to(torch.float32).reshape(rows, BLOCK, columns, BLOCK)
    largest = tiled.abs().amax(dim=(1, 3))
    factor = _LARGEST / largest
    # Nothing but zeros, or so little that its factor is not finite in float32.
    factor = torch.where(factor == torch.inf, 1.0, factor)
    scale.copy_(1.0 / factor)
    scaled = (tiled * factor[:, None, :, None]).clamp_(-_LARGEST, _LARGEST)
    weight.copy_(scaled.reshape(source.shape))


@torch.no_grad()
def dequantized(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``weight`` float8_e4m3fn ``[rows, columns]`` times ``scale``, whose blocks may be cut."""
    rows, columns = weight.shape
    spread = scale.to(torch.float32).repeat_interleave(BLOCK, 0)[:rows]
    spread = spread.repeat_interleave(BLOCK, 1)[:, :columns]
    return (weight.to(torch.float32) * spread).to(dtype)
