"""Block-wise FP8 as checkpoints have it: what its tensors are called and how large they are. Pure.

A weight of 8-bit floats has beside it one scale for each block of 128x128, and stands for their
product: ``weight ~= fp8 * scale``. So DeepSeek-V3 published it first, and transformers
(FineGrainedFP8Config), vLLM and SGLang read it.
"""

from collections.abc import Mapping

BLOCK = 128
WEIGHT_DTYPE = "F8_E4M3"
SCALE_DTYPE = "F32"
"""Of scales that wcache computes."""
SCALE_DTYPES = ("F32", "BF16")
"""Of scales that a checkpoint may bring along."""
SCALE_SUFFIX = "_scale_inv"

ON_LOAD: Mapping[str, object] = {
    "activation_scheme": "dynamic",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}
"""What the config.json of a checkpoint would say that holds what ``--quantization fp8`` makes."""


def scale_name(weight: str) -> str:
    return weight + SCALE_SUFFIX


def weight_name(name: str) -> str | None:
    """The weight that ``name`` is the scale of; None for any other name."""
    return name.removesuffix(SCALE_SUFFIX) if name.endswith(SCALE_SUFFIX) else None


def grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight ``[..., rows, columns]``: blocks at an end may be cut."""
    *stacked, rows, columns = shape
    return (*stacked, -(-rows // BLOCK), -(-columns // BLOCK))


def is_whole(shape: tuple[int, ...]) -> bool:
    """True for a matrix of whole blocks: transformers quantizes no other."""
    return len(shape) == 2 and all(size and size % BLOCK == 0 for size in shape)
