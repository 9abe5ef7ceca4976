"""The one table of quantization methods: what may be kept, and why the others may not. Pure."""

from dataclasses import dataclass
from typing import Final

_OTHER = (
    "take a bf16 checkpoint of the model, with --quantization fp8 where memory is short, or let the"
    " engine load this one from disk"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How weights can be stored in fewer bits than they were trained in."""

    key: str
    """As it is called in fingerprints and errors' ``method``."""
    title: str
    kept: str = ""
    """How weights of it are kept; empty when they are refused."""
    reason: str = ""
    """Why they are refused."""
    way_out: str = _OTHER
    names: tuple[str, ...] = ()
    """What ``quant_method`` of a config.json, or an engine, calls it; the key needs no mention."""
    recognised_by: str = ""
    """What gives it away in the headers of safetensors files, for people."""


METHODS: Final = (
    Method(
        key="none",
        title="none: F32, F16, BF16",
        kept="as the checkpoint has it, or converted by `--dtype`",
    ),
    Method(
        key="fp8",
        title="FP8 (e4m3) in blocks of 128x128",
        kept="from an FP8 checkpoint, scales sharded with their blocks, or made on load by"
        " `--quantization fp8`",
        recognised_by="`weight` F8_E4M3 with `weight_scale_inv` F32 or BF16",
    ),
    Method(
        key="fp8-tensor",
        title="per-tensor FP8",
        reason="engines merge the scales of fused layers and requantize after loading",
        way_out="take a checkpoint in block-wise FP8, or a bf16 one with --quantization fp8",
        names=("modelopt-fp8",),
        recognised_by="F8_E4M3 with one `weight_scale`",
    ),
    Method(
        key="fp8-channel",
        title="FP8 with scales that are not those of 128x128 blocks",
        reason="engines transpose weights and reshape scales after loading",
        way_out="take a checkpoint in block-wise FP8, or a bf16 one with --quantization fp8",
        names=("fbgemm-fp8", "ptpc-fp8"),
        recognised_by="F8_E4M3 with `weight_scale` per channel or group",
    ),
    Method(
        key="fp8-static",
        title="FP8 with static activation scales",
        reason="engines merge the activation scales of fused layers after loading",
        way_out="take a checkpoint with dynamic activation scales, or a bf16 one with"
        " --quantization fp8",
        recognised_by="F8_E4M3 with `input_scale` or `activation_scale`",
    ),
    Method(
        key="fp8-e5m2",
        title="FP8 in e5m2",
        reason="no engine's block-wise FP8 computes with it",
        recognised_by="any F8_E5M2",
    ),
    Method(
        key="fp8-ue8m0",
        title="FP8 with scales of bare exponents (UE8M0)",
        reason="engines repack the scales for the GPU that they find after loading",
        way_out="take a checkpoint whose scales are F32, or a bf16 one with --quantization fp8",
        names=("mxfp8",),
        recognised_by="any F8_E8M0",
    ),
    Method(
        key="mxfp4",
        title="MXFP4",
        reason="engines swizzle expert blocks and scales for one GPU's kernels after loading",
        way_out="save it dequantized (transformers' Mxfp4Config(dequantize=True) and"
        " save_pretrained()), or let the engine load it from disk",
        names=("gpt-oss-mxfp4", "fp4-experts"),
        recognised_by="`*_blocks` and `*_scales` in U8",
    ),
    Method(
        key="nvfp4",
        title="NVFP4",
        reason="engines swizzle block scales and fold global scales into others after loading",
        names=("modelopt-fp4", "fouroversix"),
        recognised_by="`weight_scale_2`, `weight_global_scale`",
    ),
    Method(
        key="awq",
        title="AWQ",
        reason="engines repack qweight and qzeros for their kernels after loading",
        names=("awq-marlin", "awq-triton"),
        recognised_by="`qweight` with `qzeros`",
    ),
    Method(
        key="gptq",
        title="GPTQ",
        reason="engines shuffle qweight by g_idx and repack it after loading",
        names=("gptq-marlin", "gptq-bitblas", "gptqmodel", "auto-round", "auto-gptq", "auto-awq"),
        recognised_by="`g_idx`",
    ),
    Method(
        key="marlin",
        title="Marlin",
        reason="its tiles are laid out for one kernel, with a workspace that kernels write to",
        names=("gptq-marlin-24", "marlin-24", "bitblas"),
        recognised_by="`B` with `s`, `B_24`, `B_meta`",
    ),
    Method(
        key="compressed-tensors",
        title="compressed-tensors",
        reason="engines unpack and repack each of its schemes after loading",
        names=("compressed-tensors-pack", "sparseml"),
        recognised_by="`weight_packed`, `weight_shape`",
    ),
    Method(
        key="modelopt",
        title="ModelOpt",
        reason="engines change its weights and scales after loading",
        recognised_by="`hf_quant_config.json`",
    ),
    Method(
        key="bitsandbytes",
        title="bitsandbytes",
        reason="its state (absmax, code books) lives in Python objects beside the bytes",
        names=("bnb",),
        recognised_by="`absmax`, `quant_map`, `SCB`",
    ),
    Method(
        key="gguf",
        title="GGUF",
        reason="its packed blocks are decoded by the kernels of one engine",
        way_out="convert it to safetensors: transformers can dequantize GGUF",
        recognised_by="`.gguf` files alone",
    ),
    Method(
        key="torchao",
        title="torchao",
        reason="its tensors are Python subclasses around other tensors",
        recognised_by="`weight_qdata`, a `:` in a name",
    ),
    Method(
        key="quanto",
        title="quanto",
        reason="its tensors are Python subclasses around other tensors",
        recognised_by="`weight._data`",
    ),
    Method(
        key="hqq",
        title="HQQ",
        reason="its meta data lives in Python objects beside the bytes",
        recognised_by="`W_q`",
    ),
    Method(
        key="eetq",
        title="EETQ and other int8 weights",
        reason="engines interleave the rows for their kernels after loading",
        names=("w8a8-int8", "experts-int8", "int8", "tpu-int8", "llm-int8"),
        recognised_by="`weight` in I8",
    ),
    Method(
        key="mlx",
        title="MLX",
        reason="its packed groups are decoded by the kernels of one engine",
        names=("metal",),
        recognised_by="`weight` in U32 with `scales`",
    ),
    Method(
        key="bitnet",
        title="BitNet",
        reason="its packed ternary weights are unpacked by the engine after loading",
        recognised_by="`weight` in U8 with `weight_scale`",
    ),
    Method(
        key="codebook",
        title="code books: AQLM, VPTQ, QuIP#, SpQR, HIGGS",
        reason="engines repack codes for their kernels after loading",
        names=("aqlm", "vptq", "quip", "spqr", "higgs", "fp-quant", "sinq"),
        recognised_by="`codes`, `indices`, `Qidxs`, `row_offsets`",
    ),
    Method(
        key="quark",
        title="Quark",
        reason="engines requantize and shuffle its weights after loading",
    ),
    Method(
        key="packed",
        title="integers that nothing explains",
        reason="weights of 8 to 32 bit integers are packed by a method that neither config.json nor"
        " their names tell",
        recognised_by="matrices of U8, I8, U16, I16, U32 or I32",
    ),
    Method(
        key="unknown",
        title="any other method",
        reason="wcache knows no method of that name, and keeps only what is known to be carried"
        " whole",
    ),
)

BY_KEY: Final = {method.key: method for method in METHODS}
_BY_NAME = {name: method.key for method in METHODS for name in (method.key, *method.names)}


def key_of(name: str) -> str:
    """The key of the method that ``quant_method`` or an engine calls ``name``."""
    return _BY_NAME.get(name.lower().replace("_", "-"), "unknown")


def table() -> str:
    """The table of the documentation, in Markdown."""
    lines = ["| method | kept | recognised by |", "|---|---|---|"]
    for method in METHODS:
        kept = method.kept or f"no: {method.reason}"
        lines.append(f"| {method.title} | {kept} | {method.recognised_by} |")
    return "\n".join(lines) + "\n"
