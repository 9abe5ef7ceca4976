"""transformers models with FP8 layers over cached weights."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import FP8_CONFIG, in_fp8, qwen3_config, qwen3_tensors, write_checkpoint
from tests.places import Places
from tests.tiny_daemon import TinyDaemon
from tests.unit.test_quantize import quantized
from tests.weights import Holder, cached
from wcache.errors import UnsupportedQuantForIPCError, WcacheError
from wcache.fingerprint import Fingerprint
from wcache.load.quantize import dequantized

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

Tensors = dict[str, torch.Tensor]
FromCache = Callable[[Path, Tensors], Any]


@pytest.fixture
def from_cache(places: Places) -> Iterator[FromCache]:
    daemon = TinyDaemon(places.rank())
    daemon.start()

    def begin(folder: Path, tensors: Tensors) -> Any:
        from wcache.engines.transformers import from_cache

        fingerprint = Fingerprint(model=str(folder), tp_size=1)
        daemon.serve(*cached(Holder(tensors), fingerprint=fingerprint))
        return from_cache()

    yield begin
    daemon.close()


def _made(tensors: Tensors) -> Tensors:
    """As ``--quantization fp8`` keeps them: what consists of whole blocks."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight") and not any(size % 128 for size in tensor.shape):
            found[name], found[name + "_scale_inv"] = quantized(tensor)
    return found


def _linears(model: Any) -> dict[str, Any]:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    return {name: part for name, part in model.named_modules() if isinstance(part, FP8Linear)}


def test_layers_of_an_fp8_checkpoint_are_bound(tmp_path: Path, from_cache: FromCache) -> None:
    tensors = in_fp8(qwen3_tensors(), torch.bfloat16)
    config = qwen3_config(quantization_config=FP8_CONFIG)
    model = from_cache(write_checkpoint(tmp_path / "m", tensors, config), tensors)
    assert len(_linears(model)) == 14
    state = dict(model.named_parameters())
    assert state.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert state[name].dtype == tensor.dtype
        assert torch.equal(state[name].contiguous().view(torch.uint8), tensor.view(torch.uint8))
        assert model.wcache_attachment.holds(state[name])
    assert model.is_quantized
    assert model.config.quantization_config.quant_method == "fp8"
    assert model.dtype == torch.bfloat16


def test_layers_that_kept_their_dtype_stay_what_they_are(
    tmp_path: Path, from_cache: FromCache
) -> None:
    plain = qwen3_tensors(intermediate=200)
    folder = write_checkpoint(tmp_path / "m", plain, qwen3_config(intermediate_size=200))
    model = from_cache(folder, _made(plain))
    linears = _linears(model)
    assert {name.split(".")[3] for name in linears} == {"self_attn"}
    mlp = model.model.layers[0].mlp.up_proj
    assert type(mlp) is torch.nn.Linear
    assert mlp.weight.dtype == torch.bfloat16
    block = linears["model.layers.1.self_attn.q_proj"]
    assert (block.weight.dtype, block.weight_scale_inv.dtype) == (
        torch.float8_e4m3fn,
        torch.float32,
    )
    assert tuple(block.block_size) == (128, 128)


def test_fp8_weights_are_near_the_plain_ones(tmp_path: Path, from_cache: FromCache) -> None:
    """Computed with on the CPU, dequantized, since FP8 layers need a GPU."""
    plain = qwen3_tensors()
    folder = write_checkpoint(tmp_path / "m", plain, qwen3_config())
    model = from_cache(folder, _made(plain))
    want = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    near = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, part in _linears(model).items():
            back = dequantized(part.weight, part.weight_scale_inv, torch.float32)
            near.get_submodule(name).weight.copy_(back)
        tokens = torch.arange(1, 13)[None]
        one, other = near(tokens).logits, want(tokens).logits
    assert not torch.equal(one, other)
    assert (one - other).norm() < 0.1 * other.norm()


def test_it_is_said_that_the_layers_need_a_gpu(
    tmp_path: Path, from_cache: FromCache, caplog: pytest.LogCaptureFixture
) -> None:
    plain = qwen3_tensors()
    from_cache(write_checkpoint(tmp_path / "m", plain, qwen3_config()), _made(plain))
    assert "14 layers of Qwen3ForCausalLM are FP8" in caplog.text


def test_bf16_model_of_a_bf16_cache_is_untouched(tmp_path: Path, from_cache: FromCache) -> None:
    plain = qwen3_tensors()
    model = from_cache(write_checkpoint(tmp_path / "m", plain, qwen3_config()), plain)
    assert _linears(model) == {}
    assert not getattr(model, "hf_quantizer", None)


@pytest.mark.parametrize(
    ("settings", "kind", "line"),
    [
        ({"quant_method": "awq"}, UnsupportedQuantForIPCError, "quantized with AWQ can not be"),
        ({**FP8_CONFIG, "weight_block_size": [1, 128]}, UnsupportedQuantForIPCError, "128x128"),
        ({**FP8_CONFIG, "scale_fmt": "ue8m0"}, WcacheError, "scales of the format 'ue8m0'"),
        ({**FP8_CONFIG, "scale_fmt": "odd"}, WcacheError, "scales of the format 'odd'"),
    ],
)
def test_other_settings_than_the_caches_are_refused(
    tmp_path: Path,
    from_cache: FromCache,
    settings: dict[str, Any],
    kind: type[Exception],
    line: str,
) -> None:
    plain = qwen3_tensors()
    config = qwen3_config(quantization_config=settings)
    folder = write_checkpoint(tmp_path / "m", plain, config)
    with pytest.raises(kind, match=line):
        from_cache(folder, _made(plain))
