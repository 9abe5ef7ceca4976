"""Shows how far the logits of a model move when --quantization fp8 makes FP8 of its weights.

    python scripts/fp8_error.py FOLDER [TOKENS]

FOLDER is a bf16 checkpoint. The model computes twice over the same TOKENS (512) token ids: those of
a text where there is a tokenizer, else random ones. On a GPU the second run goes through
transformers' FP8 layers, where it has their kernels; otherwise the weights are quantized and
multiplied out again, which shows the error of the weights without that of the activations.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import FP8Linear

from wcache.checkpoint import open_checkpoint
from wcache.fp8 import grid
from wcache.load.linears import quantizable
from wcache.load.quantize import dequantized, quantize_into

TEXT = (
    "A lighthouse keeper writes one line a day: the wind, the ships that passed, the oil that is"
    " left. After thirty years the lines are a book, and nobody could have written it in a week."
)
WIDTH = 128


def tokens_of(folder: Path, count: int, vocabulary: int) -> torch.Tensor:
    """int64[count / 128, 128]."""
    rows = max(count // WIDTH, 1)
    if not any(folder.glob("tokenizer*")):
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, vocabulary, (rows, WIDTH), generator=generator)
    found: Any = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    # Each row begins elsewhere in the text, so that no two are the same.
    text = torch.tensor(found).repeat(-(-(WIDTH + rows) // len(found)))
    return torch.stack([text[row : row + WIDTH] for row in range(rows)])


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(grid(tuple(weight.shape)), device=weight.device)
    quantize_into(weight, made, scale)
    return made, scale


def use_fp8_layers(model: Any, names: list[str]) -> None:
    settings = FineGrainedFP8Config()
    for name in names:
        path = name.removesuffix(".weight")
        old = model.get_submodule(path)
        with torch.device("meta"):
            new = FP8Linear(
                old.in_features,
                old.out_features,
                block_size=settings.weight_block_size,
                has_bias=old.bias is not None,
            )
        for leaf, tensor in zip(("weight", "weight_scale_inv"), quantized(old.weight), strict=True):
            setattr(new, leaf, torch.nn.Parameter(tensor, requires_grad=False))
        new.bias = old.bias
        model.set_submodule(path, new)


def multiply_out(model: Any, names: list[str]) -> None:
    for name in names:
        weight = model.get_parameter(name)
        weight.copy_(dequantized(*quantized(weight), weight.dtype))


@torch.no_grad()
def main(folder: Path, count: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()

    names = sorted(quantizable(open_checkpoint(folder)))
    model = load()
    total = sum(parameter.numel() for parameter in model.parameters())
    share = sum(model.get_parameter(name).numel() for name in names) / total
    print(f"{len(names)} weights with {share:.1%} of the parameters become FP8")
    tokens = tokens_of(folder, count, model.config.vocab_size).to(device)
    before = model(tokens).logits.float()
    how = "weights multiplied out again"
    if device == "cuda":
        try:
            use_fp8_layers(model, names)
            after = model(tokens).logits.float()
            how = "FP8 layers"
        except ImportError as error:
            print(f"no FP8 layers: {str(error).splitlines()[0]}")
            model = load()
    if how != "FP8 layers":
        multiply_out(model, names)
        after = model(tokens).logits.float()

    difference = (after - before).abs()
    one, other = before.log_softmax(-1), after.log_softmax(-1)
    divergence = (one.exp() * (one - other)).sum(-1)
    agreement = (before.argmax(-1) == after.argmax(-1)).float().mean()
    print(f"{how}, {tokens.numel()} positions, on {device}")
    print(f"logits in bf16: mean size {before.abs().mean():.4f}, largest {before.abs().max():.4f}")
    print(f"logits in FP8:  mean error {difference.mean():.4f}, largest {difference.max():.4f}")
    print(f"same first choice at {agreement:.1%} of positions")
    print(f"KL(bf16 || FP8): mean {divergence.mean():.6f} nats, largest {divergence.max():.6f}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or not all(number.isdigit() for number in sys.argv[2:]):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) == 3 else 512)
