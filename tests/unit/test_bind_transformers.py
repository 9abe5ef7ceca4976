"""transformers models over cached weights: equal bit for bit, and clear where they can not be."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.places import Places
from tests.tiny_daemon import TinyDaemon
from tests.weights import Holder, cached
from wcache.errors import CheckpointError, MismatchError, UsageError, WcacheError
from wcache.fingerprint import Fingerprint

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOKENS = torch.arange(1, 13)[None]


def llama(**options: Any) -> Any:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **options)
    return transformers.LlamaForCausalLM(config)


def tied() -> Any:
    return llama(tie_word_embeddings=True)


def scaled_rotary() -> Any:
    rope = {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0}
    return llama(rope_parameters=rope, tie_word_embeddings=False)


def gemma() -> Any:
    """Has a non-persistent scalar, and two sets of rotary frequencies."""
    config = transformers.Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=8)
    return transformers.Gemma3ForCausalLM(config)


def bert_head() -> Any:
    """Ties a bias as well as the embedding."""
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


def bert() -> Any:
    return transformers.BertModel(transformers.BertConfig(**SIZES))


def experts() -> Any:
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2)
    return transformers.MixtralForCausalLM(config)


class Checkpoint:
    """A saved model, and the same model loaded by transformers in bfloat16."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.folder = folder
        model.save_pretrained(folder)
        self.tensors = load_file(folder / "model.safetensors")
        self.loaded = type(model).from_pretrained(folder, dtype=torch.bfloat16)
        self.tensors = {name: t.to(torch.bfloat16) for name, t in self.tensors.items()}

    def fingerprint(self, **known: Any) -> Fingerprint:
        return Fingerprint(**{"model": str(self.folder), "tp_size": 1, **known})


Save = Callable[[Any], Checkpoint]
FromCache = Callable[..., Any]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def begin(model: Any) -> Checkpoint:
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) / 20)
        return Checkpoint(model, tmp_path / "model")

    return begin


@pytest.fixture
def daemon(places: Places) -> Iterator[TinyDaemon]:
    made = TinyDaemon(places.rank())
    made.start()
    yield made
    made.close()


@pytest.fixture
def from_cache(daemon: TinyDaemon) -> FromCache:
    """:func:`wcache.engines.transformers.from_cache` of given tensors."""

    def begin(
        tensors: "dict[str, torch.Tensor] | torch.nn.Module",
        fingerprint: Fingerprint,
        config: "Path | None" = None,
        **options: Any,
    ) -> Any:
        from wcache.engines.transformers import from_cache

        module = Holder(tensors) if isinstance(tensors, dict) else tensors
        daemon.serve(*cached(module, fingerprint=fingerprint))
        return from_cache(config=config, **options)

    return begin


def assert_equal(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    assert not got.training
    assert got.dtype == want.dtype
    with torch.no_grad():
        assert torch.equal(got(TOKENS)[0], want(TOKENS)[0])
    for name, buffer in want.named_buffers():
        assert torch.equal(got.get_buffer(name), buffer), name
        assert got.get_buffer(name).dtype == buffer.dtype
    assert got.state_dict().keys() == want.state_dict().keys()
    assert all(got.wcache_attachment.holds(parameter) for parameter in got.parameters())


@pytest.mark.parametrize("build", [tied, scaled_rotary, gemma, bert_head, bert])
def test_model_from_a_checkpoint_equals_from_pretrained(
    save: Save, from_cache: FromCache, build: Callable[[], Any]
) -> None:
    checkpoint = save(build())
    model = from_cache(checkpoint.tensors, checkpoint.fingerprint())
    assert_equal(model, checkpoint.loaded)
    model.wcache_attachment.close()


@pytest.mark.parametrize("build", [tied, gemma, bert_head, experts])
def test_published_model_equals_from_pretrained(
    save: Save, from_cache: FromCache, build: Callable[[], Any]
) -> None:
    checkpoint = save(build())
    fingerprint = checkpoint.fingerprint(architecture=type(checkpoint.loaded).__name__)
    model = from_cache(checkpoint.loaded, fingerprint)
    assert_equal(model, checkpoint.loaded)
    model.wcache_attachment.close()


def test_generation_is_that_of_the_checkpoint(save: Save, from_cache: FromCache) -> None:
    model = tied()
    model.generation_config.max_new_tokens = 5
    model.generation_config.suppress_tokens = [3]
    checkpoint = save(model)
    model = from_cache(checkpoint.tensors, checkpoint.fingerprint())
    assert model.generation_config.suppress_tokens == [3]
    want = checkpoint.loaded.generate(TOKENS, do_sample=False)
    assert torch.equal(model.generate(TOKENS, do_sample=False), want)
    model.wcache_attachment.close()


def test_tied_weights_are_one_parameter(save: Save, from_cache: FromCache) -> None:
    checkpoint = save(tied())
    assert "lm_head.weight" not in checkpoint.tensors
    model = from_cache(checkpoint.tensors, checkpoint.fingerprint())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.wcache_attachment.close()


def test_equal_weights_that_are_cached_twice_are_tied(save: Save, from_cache: FromCache) -> None:
    checkpoint = save(tied())
    head = checkpoint.tensors["model.embed_tokens.weight"].clone()
    model = from_cache({**checkpoint.tensors, "lm_head.weight": head}, checkpoint.fingerprint())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_equal(model, checkpoint.loaded)
    model.wcache_attachment.close()


def test_different_weights_are_not_tied_whatever_the_configuration_says(
    save: Save, from_cache: FromCache, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = save(tied())
    head = checkpoint.tensors["model.embed_tokens.weight"] + 1
    model = from_cache({**checkpoint.tensors, "lm_head.weight": head}, checkpoint.fingerprint())
    assert torch.equal(model.lm_head.weight, head)
    assert "left apart" in caplog.text
    model.wcache_attachment.close()


def test_checkpoint_of_the_bare_model_fits_the_one_with_a_head(
    save: Save, from_cache: FromCache
) -> None:
    checkpoint = save(tied())
    bare = {name.removeprefix("model."): t for name, t in checkpoint.tensors.items()}
    model = from_cache(bare, checkpoint.fingerprint())
    assert_equal(model, checkpoint.loaded)
    model.wcache_attachment.close()


def test_checkpoint_with_the_prefix_of_a_head_fits_the_bare_model(
    save: Save, from_cache: FromCache
) -> None:
    checkpoint = save(bert())
    prefixed = {f"bert.{name}": t for name, t in checkpoint.tensors.items()}
    # What old checkpoints have, and models compute since.
    prefixed["bert.embeddings.position_ids"] = torch.arange(64)[None]
    model = from_cache(prefixed, checkpoint.fingerprint())
    assert_equal(model, checkpoint.loaded)
    model.wcache_attachment.close()


def test_what_transformers_passes_over_is_passed_over(save: Save, from_cache: FromCache) -> None:
    checkpoint = save(tied())
    old = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(2)}
    model = from_cache({**checkpoint.tensors, **old}, checkpoint.fingerprint())
    assert_equal(model, checkpoint.loaded)
    model.wcache_attachment.close()


def test_settings_of_the_configuration_can_be_replaced(save: Save, from_cache: FromCache) -> None:
    checkpoint = save(tied())
    model = from_cache(
        checkpoint.tensors,
        checkpoint.fingerprint(model=None),
        checkpoint.folder,
        device="cpu",
        attn_implementation="eager",
        rms_norm_eps=0.5,
    )
    assert model.config.rms_norm_eps == 0.5
    assert model.config._attn_implementation == "eager"
    model.wcache_attachment.close()


# --- refusals ---------------------------------------------------------------------------------


REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[WcacheError], str]] = [
    ({"tp_size": 2}, {}, MismatchError, "tp_size: cached 2, wanted 1"),
    ({"pp_size": 2}, {}, WcacheError, "shard of a model (pp_size 2)"),
    ({}, {"device": "cuda"}, UsageError, "weights are cached on cpu, cuda was asked for"),
    ({}, {"dtype": "float32"}, UsageError, "dtype can not be chosen"),
    ({}, {"trust_remote_code": True}, UsageError, "trust_remote_code can not be chosen"),
    ({}, {"hidden_sise": 4}, UsageError, "llama has no setting hidden_sise"),
    ({}, {"hidden_size": 16}, WcacheError, "can not be bound"),
    ({}, {"num_hidden_layers": 3}, WcacheError, "in the module and not cached: model.layers.2"),
    ({}, {"num_hidden_layers": 1}, WcacheError, "has no model.layers.1"),
    ({"architecture": "OursForCausalLM"}, {}, CheckpointError, "no model 'OursForCausalLM'"),
    ({"architecture": "AutoConfig"}, {}, CheckpointError, "no model 'AutoConfig'"),
    ({"model": "some-name"}, {}, CheckpointError, "is not there: some-name"),
    ({"model": None}, {}, CheckpointError, "it has no name"),
]  # fmt: skip


@pytest.mark.parametrize(("known", "options", "error", "said"), REFUSED)
def test_refusal_says_why_and_gives_the_lease_back(
    save: Save,
    from_cache: FromCache,
    daemon: TinyDaemon,
    known: dict[str, Any],
    options: dict[str, Any],
    error: type[WcacheError],
    said: str,
) -> None:
    checkpoint = save(tied())
    with pytest.raises(error) as raised:
        from_cache(checkpoint.tensors, checkpoint.fingerprint(**known), **options)
    assert said in raised.value.message
    assert "\n" not in raised.value.message
    assert [daemon.next_event(), daemon.next_event()] == ["attach", "end"]


def test_parameter_that_is_not_cached_is_named(save: Save, from_cache: FromCache) -> None:
    checkpoint = save(tied())
    del checkpoint.tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(WcacheError, match=r"not cached: model\.layers\.1\.mlp\.up_proj\.weight\n"):
        from_cache(checkpoint.tensors, checkpoint.fingerprint())


def test_tensors_that_transformers_would_merge_are_named(save: Save, from_cache: FromCache) -> None:
    checkpoint = save(experts())
    with pytest.raises(WcacheError) as raised:
        from_cache(checkpoint.tensors, checkpoint.fingerprint())
    assert "experts.0" in raised.value.message
    assert "renames or merges" in raised.value.hint


def test_configuration_of_quantized_weights_that_are_not_is_refused(
    save: Save, from_cache: FromCache
) -> None:
    checkpoint = save(tied())
    config = transformers.AutoConfig.from_pretrained(checkpoint.folder)
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(checkpoint.folder)
    with pytest.raises(WcacheError, match="is quantized, the cached weights are not"):
        from_cache(checkpoint.tensors, checkpoint.fingerprint())


def test_folder_without_a_configuration_is_refused(
    save: Save, from_cache: FromCache, tmp_path: Path
) -> None:
    checkpoint = save(tied())
    (tmp_path / "none").mkdir()
    with pytest.raises(CheckpointError, match="no configuration of"):
        from_cache(checkpoint.tensors, checkpoint.fingerprint(), tmp_path / "none")


def test_buffer_that_the_model_does_not_compute_is_named(
    save: Save, from_cache: FromCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save(tied())
    monkeypatch.setattr(transformers.LlamaForCausalLM, "initialize_weights", lambda _: None)
    with pytest.raises(WcacheError) as raised:
        from_cache(checkpoint.tensors, checkpoint.fingerprint())
    assert raised.value.message == (
        "LlamaForCausalLM does not compute its buffers model.rotary_emb.inv_freq,"
        " model.rotary_emb.original_inv_freq"
    )
