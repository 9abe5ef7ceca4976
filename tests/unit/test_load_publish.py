"""What ``wcache.publish`` takes of a module, and how it comes out of the slabs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.loading import Daemon, manifest_of, tensors_of
from tests.places import Places, publish_config
from wcache.config import Config, ModelSection
from wcache.errors import (
    MismatchError,
    NoSuchRankError,
    OutOfMemoryError,
    UnsupportedQuantForIPCError,
    UsageError,
    WcacheError,
)
from wcache.fingerprint import Fingerprint, held_from
from wcache.load import module as modules
from wcache.load.harvest import harvest, quantization_of
from wcache.load.module import publish, publish_harvest
from wcache.load.publish import check_memory, made_slabs
from wcache.manifest import Tensor
from wcache.memory import open_memory
from wcache.memory.host import HostMemory
from wcache.memory.slab import Slab
from wcache.paths import RankId

pytestmark = pytest.mark.unit


class Layer(nn.Module):
    """All that a harvest has to carry."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.frozen = nn.Parameter(torch.arange(5), requires_grad=False)
        self.register_buffer("kept", torch.randn(3))
        self.register_buffer("cache", torch.randn(2, 2), persistent=False)
        self.register_buffer("absent", None)
        self.register_parameter("bias", None)
        self.plain = torch.tensor([1.5, 2.5], dtype=torch.float16)
        self.transposed = self.weight.detach().t()
        self.part = self.weight.detach()[1:3, 2:5]
        self.spread = torch.tensor([7.0]).expand(8)
        self.scalar = torch.tensor(True)
        self.nothing = torch.empty(0, 3)
        self.count = 3


def _publish(module: nn.Module, **extras: Any) -> Daemon:
    config = publish_config()
    daemon = Daemon(config)
    memory = open_memory("cpu")
    found = held_from(config, 0)
    publish_harvest(daemon, config, RankId("", 0), harvest(module), found, memory, extras)
    return daemon


def _described(module: nn.Module) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in harvest(module).tensors}


def test_every_tensor_comes_out_as_it_went_in() -> None:
    layer = nn.Sequential(Layer(), Layer())
    expected = {
        f"{prefix}{name}": value
        for prefix, part in (("0.", layer[0]), ("1.", layer[1]))
        for group in (part._parameters, part._buffers, vars(part))
        for name, value in group.items()
        if isinstance(value, torch.Tensor)
    }
    with _publish(layer) as daemon:
        found = tensors_of(daemon.generation)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert found[name].stride() == tensor.stride()
            assert found[name].storage_offset() == tensor.storage_offset()
            assert torch.equal(found[name], tensor.detach())


def test_views_share_the_storage_that_they_are_views_of() -> None:
    described = _described(Layer())
    assert (
        described["weight"].storage == described["transposed"].storage == described["part"].storage
    )
    assert described["transposed"].stride == (1, 6)
    assert (described["part"].storage_offset, described["part"].shape) == (8, (2, 3))
    assert described["spread"].stride == (0,)


def test_a_view_of_what_is_published_still_is_one() -> None:
    with _publish(Layer()) as daemon:
        found = tensors_of(daemon.generation)
        assert found["part"].untyped_storage().data_ptr() == (
            found["weight"].untyped_storage().data_ptr()
        )


def test_kinds_and_persistence_are_kept() -> None:
    described = _described(Layer())
    kinds = {name: (tensor.kind, tensor.persistent) for name, tensor in described.items()}
    assert kinds["weight"] == kinds["frozen"] == ("parameter", True)
    assert kinds["kept"] == ("buffer", True)
    assert kinds["cache"] == ("buffer", False)
    assert kinds["plain"] == ("attribute", False)
    assert not {"absent", "bias", "count"} & described.keys()


def test_ties_are_the_same_object_under_two_names() -> None:
    module = nn.Module()
    module.embed = nn.Embedding(6, 4)
    module.head = nn.Linear(4, 6, bias=False)
    module.head.weight = module.embed.weight
    module.like = nn.Parameter(module.embed.weight.detach())
    described = _described(module)
    assert {name: tensor.tied_to for name, tensor in described.items()} == {
        "like": None,
        "embed.weight": None,
        "head.weight": "embed.weight",
    }
    # Its own parameter over the same bytes is no tie, and is not copied twice either.
    assert described["like"].storage == described["embed.weight"].storage


def test_a_module_under_two_names_has_its_tensors_under_both() -> None:
    module = nn.Module()
    module.one = nn.Linear(2, 2)
    module.other = module.one
    described = _described(module)
    assert described["other.weight"].tied_to == "one.weight"
    assert described["other.bias"].tied_to == "one.bias"


def test_storages_are_copied_whole() -> None:
    module = nn.Module()
    module.part = torch.zeros(1000)[:10]
    assert harvest(module).weight_bytes == 4000


def test_the_fingerprint_says_what_is_known() -> None:
    with _publish(Layer()) as daemon:
        held = manifest_of(daemon.generation).fingerprint
        assert (held.model, held.loader, held.device) == ("test-model", "publish", "cpu")


def test_extras_travel_in_the_manifest() -> None:
    with _publish(Layer(), **{"layer.scaled": True}) as daemon:
        assert manifest_of(daemon.generation).extras == {"layer.scaled": True}


def test_progress_ends_with_everything_done() -> None:
    module = Layer()
    total = harvest(module).weight_bytes
    with _publish(module) as daemon:
        phases = [message.phase for message in daemon.progress]
        assert list(dict.fromkeys(phases)) == ["allocate", "read", "digest", "publish"]
        last = {message.phase: message for message in daemon.progress}
        assert last["read"].done_bytes == last["digest"].done_bytes == total


class Wrapper(torch.Tensor):
    """A tensor whose content is elsewhere, as that of a DTensor is."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no cls
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return NotImplemented


def _wrapped() -> torch.Tensor:
    made = torch.Tensor._make_wrapper_subclass(Wrapper, (2, 2))
    assert isinstance(made, torch.Tensor)
    return made


def _freed() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.ones(2, 2).to_sparse(), "its layout is sparse_coo"),
        (lambda: torch.ones(2, dtype=torch.complex128), "its dtype is complex128"),
        (lambda: torch.ones(2, dtype=torch.float8_e4m3fnuz), "its dtype is float8_e4m3fnuz"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "it is a conjugate or negative"),
        (_wrapped, "it is a Wrapper, which keeps its content in other tensors"),
        (_freed, "its storage was freed"),
        (lambda: nn.UninitializedParameter(), "it is not initialized"),
    ],
)  # fmt: skip
def test_tensors_that_are_no_plain_bytes_are_refused_by_name(make: Any, reason: str) -> None:
    module = nn.Module()
    module.inner = nn.Module()
    module.inner.odd = make()
    with pytest.raises(WcacheError, match=r"'inner\.odd' can not be published") as caught:
        harvest(module)
    assert reason in caught.value.message


def test_meta_tensors_are_named() -> None:
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    module[0] = nn.Linear(2, 2)
    with pytest.raises(WcacheError) as caught:
        harvest(module)
    assert caught.value.message == (
        "tensors without content (on the meta device):"
        " 1.weight, 1.bias, 2.weight, 2.bias, 3.weight and 1 more"
    )


def test_a_subclass_with_bytes_of_its_own_is_taken() -> None:
    class Marked(nn.Parameter):
        pass

    module = nn.Module()
    module.weight = Marked(torch.ones(3))
    assert _described(module)["weight"].shape == (3,)


def test_a_module_without_tensors_is_refused() -> None:
    with pytest.raises(WcacheError, match="ReLU has no tensors to publish"):
        harvest(nn.ReLU())


@pytest.mark.parametrize(
    "extras",
    [{"a": object()}, {"a": float("nan")}, {"a": (1, 2)}, {"a": {1: 2}}, {"a": b"x"}],
)
def test_extras_that_would_come_back_different_are_refused(extras: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="extras"):
        modules._checked_extras(extras)


def test_a_rank_that_loads_by_itself_takes_nothing_from_an_engine() -> None:
    config = Config(model=ModelSection(path="/m"))
    with pytest.raises(WcacheError, match="rank 0 loads /m itself"):
        modules._checked_config(config, RankId("", 0), None)


def test_another_model_than_the_configured_is_refused() -> None:
    with pytest.raises(MismatchError, match="waits for the model 'test-model', this is 'other'"):
        modules._checked_config(publish_config(), RankId("", 0), "other")


def test_too_little_memory_is_said_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = publish_config()
    memory = open_memory("cpu")
    monkeypatch.setattr(memory, "free_bytes", lambda: 1 << 20)
    monkeypatch.setattr(memory, "create", None)
    daemon = Daemon(config)
    with pytest.raises(OutOfMemoryError) as caught:
        publish_harvest(daemon, config, RankId("", 0), harvest(Layer()), Fingerprint(), memory, {})
    assert caught.value.message == (
        "rank 0 needs 2.0 MiB of memory (2097152 bytes), the host has 1.0 MiB free (1048576 bytes)"
    )


def test_more_slabs_than_can_be_handed_over_are_refused() -> None:
    config = publish_config()
    with pytest.raises(UsageError, match="at most 4095 are handed over"):
        check_memory(config, open_memory("cpu"), 0, 5000 * (2 << 20))


class EngineConfig:
    """How vLLM and SGLang tell of a method."""

    def __init__(self, name: str, **known: Any) -> None:
        self._name = name
        vars(self).update(known)

    def get_name(self) -> str:
        return self._name


def _told(**attributes: Any) -> nn.Module:
    """A module whose third layer, and nothing else, has ``attributes``."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    vars(module[2]).update(attributes)
    return module


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
TOLD: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"quantization_config": None}, None),
    ({"quantization_config": FP8}, "fp8"),
    ({"config": SimpleNamespace(quantization_config=FP8)}, "fp8"),
    ({"quant_method": SimpleNamespace(quant_config=None)}, None),
    ({"quant_method": SimpleNamespace(
        quant_config=EngineConfig("fp8", weight_block_size=[128, 128]))}, "fp8"),
]  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ({"hf_quantizer": SimpleNamespace(
        quantization_config=SimpleNamespace(to_dict=lambda: {"quant_method": "hqq"}))}, "hqq"),
    ({"quant_config": EngineConfig("gptq_marlin")}, "gptq"),
    ({"quant_method": SimpleNamespace(
        quant_config=EngineConfig("fp8", weight_block_size=None))}, "fp8-tensor"),
    ({"quant_method": SimpleNamespace(quant_config=object())}, "unknown"),
]  # fmt: skip


@pytest.mark.parametrize(("attributes", "method"), TOLD)
def test_a_module_tells_its_method(attributes: dict[str, Any], method: str | None) -> None:
    assert quantization_of(_told(**attributes)) == method


@pytest.mark.parametrize(("attributes", "method"), REFUSED)
def test_a_module_of_a_method_that_can_not_be_kept_is_not_published(
    attributes: dict[str, Any], method: str
) -> None:
    """Before a daemon is even asked: there is none here."""
    with pytest.raises(UnsupportedQuantForIPCError) as caught:
        modules.publish(_told(**attributes))
    assert caught.value.method == method
    assert caught.value.message.startswith("2")


def test_transformers_tells_its_method() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8
    )
    model = transformers.LlamaForCausalLM(config)
    assert quantization_of(model) is None
    model.config.quantization_config = transformers.FineGrainedFP8Config()
    assert quantization_of(model) == "fp8"
    model.config.quantization_config = transformers.Mxfp4Config()
    with pytest.raises(UnsupportedQuantForIPCError, match="quantized with MXFP4 can not be kept"):
        quantization_of(model)


def test_slabs_that_were_made_are_given_back_when_one_can_not_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = HostMemory()
    made: list[Slab] = []
    create = memory.create

    def limited(nbytes: int) -> Slab:
        if nbytes > 2 << 20:
            raise OutOfMemoryError("no more")
        made.append(create(nbytes))
        return made[-1]

    monkeypatch.setattr(memory, "create", limited)
    sizes = [2 << 20, 2 << 20, 4 << 20, 2 << 20, 2 << 20]
    told: list[int] = []
    with pytest.raises(OutOfMemoryError, match="no more"), made_slabs(memory, sizes, told.append):
        pytest.fail("there are not enough slabs")
    assert len(made) >= 2
    assert all(slab.fd == -1 for slab in made)
    assert told == [2 << 20, 4 << 20]


def test_slabs_come_in_the_order_of_their_sizes() -> None:
    sizes = [2 << 20, 6 << 20, 4 << 20, 2 << 20]
    told: list[int] = []
    with made_slabs(HostMemory(), sizes, told.append) as slabs:
        assert [slab.nbytes for slab in slabs] == sizes
        assert told == [2 << 20, 8 << 20, 12 << 20, 14 << 20]
    assert all(slab.fd == -1 for slab in slabs)


def test_publishing_goes_where_attaching_would(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WCACHE_INSTANCE", "draft")
    monkeypatch.setenv("WCACHE_RANK", "2")
    with pytest.raises(NoSuchRankError, match="draft:2"):
        publish(nn.Linear(2, 2))
