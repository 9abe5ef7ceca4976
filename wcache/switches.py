"""Which settings of an engine change the layout of finished weights, and which are set.

Two engines of one version may lay the same checkpoint out differently: a backend repacks scales or
shuffles tiles, a switch interleaves the rows of a fused projection in place. Shapes and dtypes may
well be the same, so nothing but the settings tells the bytes apart.

What is not known is taken for a switch: of an engine's own environment variables all that are set
belong into the fingerprint, except what is known to be harmless; of its options those in the table
or with a word in their name that weights depend on. That may part weights that are the same, at the
price of a load from disk. The other way round the price would be wrong tokens.
"""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wcache.errors import UsageError

MAX_SWITCHES = 256
MAX_NAME_LENGTH = 128
MAX_VALUE_LENGTH = 256
"""A longer value is told by its digest."""


@dataclass(frozen=True, slots=True)
class Switch:
    """A setting that is known to change the layout."""

    name: str
    """Of an environment variable, or of an option with its dashes."""
    why: str
    """What it does to the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSwitches:
    """What is known of one engine's settings."""

    prefixes: tuple[str, ...]
    """Of its environment variables."""
    variables: tuple[Switch, ...]
    options: tuple[Switch, ...]


VLLM = EngineSwitches(
    prefixes=("VLLM_",),
    variables=(
        Switch("VLLM_USE_DEEP_GEMM", "DeepGEMM lays out block scales of FP8 linears its own way"),
        Switch("VLLM_MOE_USE_DEEP_GEMM", "the same for the scales of FP8 experts"),
        Switch("VLLM_USE_DEEP_GEMM_E8M0", "makes FP8 block scales powers of two (UE8M0), packed"),
        Switch("VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES", "pads and transposes FP8 block scales"),
        Switch("VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER", "chooses the GEMM of FP8 linears"),
        Switch("VLLM_USE_FLASHINFER_MOE_INT4", "shuffles int4 experts for TensorRT-LLM kernels"),
        Switch("VLLM_DISABLED_KERNELS", "another kernel is chosen, with a packing of its own"),
        Switch("VLLM_BATCH_INVARIANT", "chooses kernels whose weights are not repacked"),
        Switch("VLLM_MARLIN_INPUT_DTYPE", "Marlin scales weights for the dtype of activations"),
        Switch("VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD", "MXFP4 weights become bf16 at load"),
        Switch("VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD", "MXFP8 weights become bf16 at load"),
        Switch("VLLM_HUMMING_ONLINE_QUANT_CONFIG", "quantizes weights at load"),
        Switch("VLLM_USE_TRITON_AWQ", "AWQ weights are packed for another kernel"),
        Switch("VLLM_MLA_DISABLE", "the absorbed projections of MLA are not made"),
        Switch("VLLM_REPLICATE_EMBED", "every rank holds the whole embedding"),
        Switch("VLLM_DCP_Q_REPLICATE", "query projections are replicated, not sharded"),
        Switch("VLLM_PP_LAYER_PARTITION", "which layers a pipeline stage holds"),
        Switch("VLLM_ROCM_USE_AITER", "AITER shuffles weights into tiles"),
        Switch("VLLM_ROCM_USE_AITER_LINEAR", "the same for linear layers"),
        Switch("VLLM_ROCM_USE_AITER_MOE", "the same for experts"),
        Switch("VLLM_ROCM_FP8_PADDING", "pads FP8 weights to 256 bytes"),
        Switch("VLLM_ROCM_MOE_PADDING", "pads the weights of experts"),
        Switch("VLLM_CPU_INT4_W4A8", "repacks int4 weights for W4A8 kernels"),
        Switch("VLLM_ZENTORCH_WEIGHT_PREPACK", "packs weights into blocks at load"),
        Switch("VLLM_XPU_FORCE_N_CONTIG_WEIGHT", "transposes unquantized linears"),
        Switch("VLLM_MODEL_REDIRECT_PATH", "another checkpoint is read than the one named"),
        Switch("VLLM_TEST_FORCE_LOAD_FORMAT", "weights may be random"),
    ),
    options=(
        Switch("--quantization", "the method, and all that it does after loading"),
        Switch("--quantization-config", "quantizes at load"),
        Switch("--dtype", "of weights that are not quantized"),
        Switch("--kv-cache-dtype", "FP8 adds scales to attention layers"),
        Switch("--moe-backend", "experts are shuffled and their scales packed for the backend"),
        Switch("--linear-backend", "linears are packed for the backend"),
        Switch("--attention-backend", "MLA's absorbed projections depend on it"),
        Switch("--attention-config", "as --attention-backend"),
        Switch("--kernel-config", "as --moe-backend and --linear-backend"),
        Switch("--enable-expert-parallel", "whole experts instead of slices of each"),
        Switch("--enable-eplb", "adds redundant experts and moves them"),
        Switch("--eplb-config", "how many redundant experts"),
        Switch("--expert-placement-strategy", "which experts a rank holds"),
        Switch("--all2all-backend", "experts are laid out for its dispatch"),
        Switch("--compilation-config", "fusions that rewrite weights can be turned on in it"),
        Switch("--hf-overrides", "changes the model's configuration, sizes included"),
        Switch("--model-impl", "transformers' own modules do not fuse projections"),
        Switch("--model-class-overrides", "another class may lay out its weights otherwise"),
        Switch("--decode-context-parallel-size", "replicates projections over its ranks"),
        Switch("--prefill-context-parallel-size", "as --decode-context-parallel-size"),
        Switch("--mm-encoder-tp-mode", "a vision tower is replicated or sharded"),
        Switch("--enable-lora", "wraps linear layers"),
        Switch("--speculative-config", "a draft may share or add weights"),
        Switch("--additional-config", "of a platform's plugin, which may do anything"),
    ),
)
SGLANG = EngineSwitches(
    # SGL_ is what its variables began with before they were renamed.
    prefixes=("SGLANG_", "SGL_"),
    variables=(
        Switch("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "permutes the rows of w13 in place"),
        Switch("SGLANG_ENABLE_JIT_DEEPGEMM", "DeepGEMM packs FP8 block scales, as UE8M0 on SM100"),
        Switch("SGL_ENABLE_JIT_DEEPGEMM", "the older name of SGLANG_ENABLE_JIT_DEEPGEMM"),
        Switch("SGLANG_USE_DEEPGEMM_BMM", "MLA keeps its absorbed projections in FP8"),
        Switch("SGLANG_DEEPGEMM_STANDARD_LAYOUT", "chooses the layout of scales for DeepGEMM"),
        Switch("SGLANG_USE_AITER", "AITER shuffles weights into tiles"),
        Switch("SGLANG_USE_AITER_MOE_GU_ITLV", "interleaves the gate and up tiles of experts"),
        Switch("SGLANG_USE_AITER_FP8_PER_TOKEN", "requantizes FP8 weights by channel"),
        Switch("SGLANG_ROCM_DISABLE_LINEARQUANT", "leaves linears unquantized"),
        Switch("SGLANG_ROCM_K3_FUSE_KDA_INPROJ", "fuses projections into one weight"),
        Switch("SGLANG_INT4_WEIGHT", "FP8 experts become int4 at load"),
        Switch("SGLANG_MOE_PADDING", "pads the weights of experts"),
        Switch("SGLANG_FORCE_FP8_MARLIN", "packs FP8 weights for Marlin"),
        Switch("SGLANG_CPU_QUANTIZATION", "quantizes and packs for the CPU at load"),
        Switch("SGLANG_USE_DYNAMIC_MXFP4_LINEAR", "quantizes linears at load"),
        Switch("SGLANG_HUMMING_ONLINE_QUANT_CONFIG", "quantizes weights at load"),
        Switch("SGLANG_FP8_IGNORED_LAYERS", "which layers are quantized"),
        Switch("SGLANG_FP4_IGNORED_LAYERS", "which layers are quantized"),
        Switch("SGLANG_NVFP4_CKPT_FP8_GEMM_IN_ATTN", "attention becomes FP8 at load"),
        Switch("SGLANG_NVFP4_CKPT_FP8_NEXTN_MOE", "experts of the draft layer become FP8 at load"),
        Switch("SGLANG_MOE_NVFP4_DISPATCH", "changes the scales of NVFP4 experts"),
        Switch("SGLANG_DSV4_FP4_EXPERTS", "how experts of DeepSeek V4 are read"),
        Switch("SGLANG_DSV4_FP4_DEQUANT", "FP4 experts become FP8 at load"),
        Switch("SGLANG_OPT_FUSE_WQA_WKV", "fuses projections into one weight"),
        Switch("SGLANG_OPT_FP8_WO_A_GEMM", "keeps wo_a in FP8"),
        Switch("SGLANG_OPT_LINEARIZED_SHARED_SINK", "stacks the weights of the shared sink"),
        Switch("SGLANG_DSPARK_OPT_MARKOV_W2_BF16", "dtype of a weight of the draft"),
        Switch("SGLANG_DSPARK_OPT_MARKOV_W2_TP_SHARD", "shards a weight of the draft"),
        Switch("SGLANG_DSPARK_FP32_LM_HEAD", "dtype of the draft's head"),
        Switch("SGLANG_SHARED_EXPERT_TP1", "every rank holds the whole shared expert"),
        Switch("SGLANG_ENABLE_EMBED_REPLICATION", "every rank holds the whole embedding"),
        Switch("SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT", "leaves weights in their plain format"),
        Switch("SGLANG_NPU_W4A4_NEW_PACKING", "another packing of int4 weights"),
    ),
    options=(
        Switch("--quantization", "the method, and all that it does after loading"),
        Switch("--torchao-config", "quantizes at load"),
        Switch("--dtype", "of weights that are not quantized"),
        Switch("--kv-cache-dtype", "FP8 adds scales to attention layers"),
        Switch("--moe-runner-backend", "experts are shuffled and their scales packed for it"),
        Switch("--fp8-gemm-backend", "FP8 block scales are packed for the backend"),
        Switch("--fp4-gemm-backend", "FP4 weights are shuffled for the backend"),
        Switch("--moe-a2a-backend", "experts are laid out for its dispatch"),
        Switch("--attention-backend", "MLA's absorbed projections depend on it"),
        Switch("--prefill-attention-backend", "as --attention-backend"),
        Switch("--decode-attention-backend", "as --attention-backend"),
        Switch("--enable-dp-attention", "attention is replicated, not sharded"),
        Switch("--enable-dp-lm-head", "the head is sharded over other ranks"),
        Switch("--moe-dense-tp-size", "how dense layers of an expert model are sharded"),
        Switch("--disable-shared-experts-fusion", "shared experts are not one more routed one"),
        Switch("--ep-num-redundant-experts", "adds experts"),
        Switch("--init-expert-location", "which experts a rank holds"),
        Switch("--enable-eplb", "moves experts while it runs"),
        Switch("--json-model-override-args", "changes the model's configuration, sizes included"),
        Switch("--model-impl", "transformers' own modules do not fuse projections"),
        Switch("--enable-lora", "wraps linear layers"),
        Switch("--lora-paths", "as --enable-lora"),
        Switch("--attn-cp-size", "replicates projections over its ranks"),
    ),
)
ENGINES: Mapping[str, EngineSwitches] = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "transformers": EngineSwitches(prefixes=(), variables=(), options=()),
}

# Known to leave weights alone, by the name without the engine's prefix. How a name begins or ends
# tells where things go and how long they are waited for; anything else is here by its whole name.
HARMLESS_BEGINNINGS = (
    "LOG_", "LOGGING_", "USAGE_", "MEDIA_", "ASSETS_", "MAX_AUDIO_", "MAX_IMAGE_", "RAY_", "NIXL_",
    "MOONCAKE_", "MORI_", "HICACHE_", "DISAGGREGATION_", "ENCODER_", "GRPC_", "PROFILE_", "OTLP_",
    "CUDA_COREDUMP", "DP_MASTER_", "DP_RANK",
)  # fmt: skip
HARMLESS_ENDINGS = (
    "PORT", "_HOST", "_IP", "_URL", "_TIMEOUT", "_TIMEOUT_S", "_TIMEOUT_MS", "_TIMEOUT_SECONDS",
    "_INTERVAL", "_CACHE_DIR", "_CACHE_ROOT", "CONFIG_ROOT", "_PROFILER_DIR",
)  # fmt: skip
_HARMLESS_NAMES = (
    # vLLM's, and SGLang's of the same name
    "ALLOW_LONG_MAX_MODEL_LEN CACHE_DIR CACHE_ROOT CONFIGURE_LOGGING CPU_KVCACHE_SPACE"
    " CPU_NUM_OF_RESERVED_CPU CPU_OMP_THREADS_BIND DEEP_GEMM_WARMUP DISABLE_COMPILE_CACHE"
    " DISABLE_LOG_LOGO DIST_IDENT DO_NOT_TRACK DP_SIZE ENABLE_V1_MULTIPROCESSING"
    " FLASHINFER_WORKSPACE_BUFFER_SIZE KEEP_ALIVE_ON_ENGINE_DEATH MQ_MAX_CHUNK_BYTES_MB"
    " NCCL_SO_PATH NO_USAGE_STATS PROCESS_NAME_PREFIX RPC_BASE_PATH SERVER_DEV_MODE SKIP_P2P_CHECK"
    " TRACE_FUNCTION USE_FLASHINFER_SAMPLER WORKER_MULTIPROC_METHOD XGRAMMAR_CACHE_MB"
    # what vLLM sets in its own processes, in some of them or for some ways to run
    " OMP_NUM_THREADS_SET_BY_VLLM USE_BREAKABLE_CUDAGRAPH"
    # SGLang's
    " ALLOW_OVERWRITE_LONGER_CONTEXT_LEN AUTO_NUMA_BIND BLOCK_NONZERO_RANK_CHILDREN"
    " CLIP_MAX_NEW_TOKENS_ESTIMATION ENABLE_HEALTH_ENDPOINT_GENERATION FLASHINFER_WORKSPACE_SIZE"
    " IN_DEEPGEMM_PRECOMPILE_STAGE IS_FIRST_RANK_ON_NODE IS_IN_CI IS_IN_CI_AMD"
    " JIT_DEEPGEMM_COMPILE_WORKERS JIT_DEEPGEMM_FAST_WARMUP JIT_DEEPGEMM_PRECOMPILE NUMA_BIND_V2"
    " ONE_VISIBLE_DEVICE_PER_PROCESS SET_CPU_AFFINITY"
)
HARMLESS = frozenset(_HARMLESS_NAMES.split())
# Never into a fingerprint, which anybody who may ask for the status can read.
_SECRET = re.compile(
    r"KEY(_ID)?$|SECRET|PASSWORD|PASSWD|CREDENTIAL|(API|AUTH|ACCESS|BEARER|HF|HUB|USER)_TOKEN"
)
_OPTION_WORDS = re.compile(
    r"quant|dtype|moe|expert|gemm|linear|attention-backend|attn-backend|fus|eplb|override|swizzle"
    r"|shuffle|interleave|pack|layout|precision|lora|shard|replicat|tie-|fp4|fp8|int4|int8|bf16"
)


def from_environment(engine: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``engine`` that are set and may change the layout, by name.

    For an engine that is not known those of all known ones are taken. An empty value is one that is
    set. A secret is never taken.
    """
    prefixes = tuple(prefix for one in _engines(engine) for prefix in one.prefixes)
    return {
        name: _value(value)
        for name, value in sorted(environment.items())
        if _is_name(name)
        and any(
            name.startswith(prefix) and _may_matter(name.removeprefix(prefix))
            for prefix in prefixes
        )
    }


def from_arguments(engine: str | None, arguments: Sequence[str]) -> dict[str, str]:
    """The options of a command line that may change the layout, as ``--dashed-name`` and value.

    ``arguments`` are those of an engine: ``--name value``, ``--name=value``, ``--name_x value`` and
    a ``--name`` alone, which becomes ``true``. Where one is given twice the last counts. An option
    with a part of a dotted name, such as ``--kernel-config.moe_backend``, counts when its first
    part does.
    """
    known = {switch.name for one in _engines(engine) for switch in one.options}
    found: dict[str, str] = {}
    for place, argument in enumerate(arguments):
        if not argument.startswith("--") or argument == "--":
            continue
        name, has_value, value = argument.partition("=")
        name = name.replace("_", "-")
        if not has_value:
            following = arguments[place + 1] if place + 1 < len(arguments) else "--"
            value = "true" if following.startswith("--") else following
        first = name.partition(".")[0]
        if first in known or (_OPTION_WORDS.search(name) and not is_secret(name)):
            found[name] = _value(value)
    return dict(sorted(found.items()))


def set_here(
    engine: str | None,
    settings: Mapping[str, object] | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """All switches of an engine that runs in this process: ``switches`` of a fingerprint.

    ``settings`` is what the engine knows that the environment does not show, by name: options that
    it was given, backends that it has chosen. ``None`` is one that is not set. Raises
    :class:`UsageError` for more than a fingerprint takes.
    """
    found = from_environment(engine, environment)
    for name, value in (settings or {}).items():
        if not _is_name(name):
            raise UsageError(f"not the name of a switch: {str(name)[:40]!r}")
        if value is not None:
            found[name] = _value(str(value))
    if len(found) > MAX_SWITCHES:
        raise UsageError(
            f"{len(found)} switches are set, a fingerprint takes {MAX_SWITCHES}",
            hint="unset variables of the engine that are not meant for it",
        )
    return found


def _engines(engine: str | None) -> tuple[EngineSwitches, ...]:
    if engine is not None and engine in ENGINES:
        return (ENGINES[engine],)
    return tuple(ENGINES.values())


def _is_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME_LENGTH and _is_utf8(name)


def _may_matter(name: str) -> bool:
    """``name`` is without the engine's prefix."""
    return not (
        name in HARMLESS
        or name.startswith(HARMLESS_BEGINNINGS)
        or name.endswith(HARMLESS_ENDINGS)
        or is_secret(name)
    )


def is_secret(name: str) -> bool:
    """Whether the value of a variable or an option with that name is nobody's to see."""
    return _SECRET.search(name.upper().replace("-", "_")) is not None


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """A command line for others to read: ``***`` for what follows an option with a secret.

    Arguments need not be UTF-8, what is written of them must be.
    """
    told: list[str] = []
    hidden = False
    for argument in arguments:
        name, has_value, _ = argument.partition("=")
        is_option = argument.startswith("-") or has_value
        if hidden and not argument.startswith("-"):
            told.append("***")
        elif is_option and has_value and is_secret(name):
            told.append(f"{name}=***")
        else:
            told.append(argument)
        hidden = argument.startswith("-") and not has_value and is_secret(name)
    return [argument.encode(errors="replace").decode() for argument in told]


def _value(value: str) -> str:
    """``value``, or its digest where it is too long to be told or no UTF-8."""
    if len(value) <= MAX_VALUE_LENGTH and _is_utf8(value):
        return value
    data = value.encode(errors="surrogateescape")
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
