"""Publishing slab by slab out of a module that goes on being used, without a vLLM."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from tests.loading import Daemon, manifest_of, tensors_of
from wcache.client.slots import Tree
from wcache.config import Config, LayoutSection, MemorySection, ModelSection
from wcache.engines.vllm import fill
from wcache.engines.vllm.fill import Claim, publish
from wcache.engines.vllm.python_state import changed, plain_state, restore
from wcache.engines.vllm.wanted import Wanted, is_same_model
from wcache.errors import MismatchError, OutOfMemoryError, WcacheError
from wcache.fingerprint import Fingerprint
from wcache.manifest import ShardIdentity
from wcache.memory.host import HostMemory
from wcache.memory.slab import Slab
from wcache.paths import RankId
from wcache.protocol.messages import LoadOrder

pytestmark = pytest.mark.unit

MIB = 1 << 20


class Weight(nn.Parameter):
    """A class of an engine's own, with an attribute."""

    loader: str


class Part(nn.Module):
    cache: torch.Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = Weight(torch.randn(rows, 256), requires_grad=False)
        self.weight.loader = "kept"
        self.register_buffer("cache", torch.randn(8), persistent=False)
        self.scale = torch.ones(3)
        self.shape: tuple[int, ...] = (0, 0)
        self.count = 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # 1.5 MiB each, 5 MiB, and one that is tied: slabs of 2 MiB hold one of them each.
        self.parts = nn.ModuleList(Part(rows) for rows in (1536, 1536, 5120))
        self.head = nn.Linear(256, 1536, bias=False)
        self.head.weight = _parts(self)[0].weight


def _parts(model: Model) -> list[Part]:
    return [part for part in model.parts if isinstance(part, Part)]


def _config() -> Config:
    return Config(
        model=ModelSection(path="m", loader="publish"), memory=MemorySection(slab_bytes=2 * MIB)
    )


def _wanted(**fields: Any) -> Wanted:
    found = Fingerprint(content="sha256:1", engine="vllm", dtype="float32", tp_size=1, tp_rank=0,
                        pp_size=1, pp_rank=0, device="cpu", switches={"a": "b"})  # fmt: skip
    loose: Any = SimpleNamespace(
        rank=RankId("", 0), device=torch.device("cpu"), shard_bytes=0, checkpoint=None,
        fingerprint=msgspec.structs.replace(found, **fields),
        identity=SimpleNamespace(shards=(ShardIdentity("f", 1, "a:1", "a:2"),)),
    )  # fmt: skip
    made: Wanted = loose
    return made


def _publish(model: nn.Module, extras: dict[str, Any] | None = None) -> Daemon:
    daemon: Any = Daemon(_config())
    publish(Claim(daemon, LoadOrder(generation=1, config=_config())), model, extras or {},
            _wanted())  # fmt: skip
    made: Daemon = daemon
    return made


def test_what_is_published_is_what_the_module_had() -> None:
    model = Model()
    before = {name: t.clone() for name, t in model.state_dict(keep_vars=True).items()}
    with _publish(model, {"parts.0.count": 2}) as daemon:
        found, manifest = tensors_of(daemon.generation), manifest_of(daemon.generation)
        for name, tensor in before.items():
            assert torch.equal(found[name], tensor), name
        assert manifest.extras == {"parts.0.count": 2}
        assert manifest.fingerprint.switches == {"a": "b"}
        assert (manifest.fingerprint.content, manifest.fingerprint.loader) == (
            "sha256:1",
            "publish",
        )
        assert [shard.name for shard in manifest.checkpoint] == ["f"]
        assert {t.name: t.tied_to for t in manifest.tensors}["head.weight"] == "parts.0.weight"


def test_no_storage_crosses_a_slab_and_a_large_one_has_its_own() -> None:
    with _publish(Model()) as daemon:
        manifest = manifest_of(daemon.generation)
    assert [slab.nbytes for slab in manifest.slabs] == [2 * MIB, 2 * MIB, 6 * MIB]
    edges = [0, 2 * MIB, 4 * MIB, 10 * MIB]
    for storage in manifest.storages:
        slab = max(index for index, edge in enumerate(edges) if edge <= storage.offset)
        assert storage.offset + storage.nbytes <= edges[slab + 1]


def test_parameters_stay_the_same_objects_over_other_memory() -> None:
    model = Model()
    parameters = dict(model.named_parameters())
    content = {name: p.detach().clone() for name, p in parameters.items()}
    places = {name: p.data_ptr() for name, p in parameters.items()}
    private = _parts(model)[0].cache.data_ptr(), _parts(model)[0].scale.data_ptr()
    with _publish(model):
        for name, parameter in model.named_parameters():
            assert parameter is parameters[name]
            assert parameter.data_ptr() != places[name]
            assert torch.equal(parameter, content[name])
        assert type(_parts(model)[0].weight) is Weight
        assert _parts(model)[0].weight.loader == "kept"
        assert model.head.weight is _parts(model)[0].weight
        assert (_parts(model)[0].cache.data_ptr(), _parts(model)[0].scale.data_ptr()) == private


def test_each_weight_is_freed_before_the_next_slab_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    freed: list[int] = []
    owners = []
    for index, part in enumerate(_parts(model)):
        # torch's own memory can not be watched, an array's end can.
        array = part.weight.detach().numpy().copy()
        weakref.finalize(array, freed.append, index)
        part.weight.data = torch.from_numpy(array)
        owners.append(index)
        del array
    seen: list[list[int]] = []
    create = HostMemory.create

    def watched(self: HostMemory, nbytes: int) -> Slab:
        gc.collect()
        seen.append(sorted(freed))
        return create(self, nbytes)

    monkeypatch.setattr(HostMemory, "create", watched)
    with _publish(model):
        gc.collect()
    assert seen == [[], [0], [0, 1]]
    assert sorted(freed) == owners


def test_a_model_goes_on_computing_when_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    content = {name: p.detach().clone() for name, p in model.named_parameters()}
    create = HostMemory.create
    made: list[int] = []

    def once(self: HostMemory, nbytes: int) -> Slab:
        if made:
            raise OutOfMemoryError("no room")
        made.append(nbytes)
        return create(self, nbytes)

    monkeypatch.setattr(HostMemory, "create", once)
    with pytest.raises(OutOfMemoryError):
        _publish(model)
    assert made
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, content[name])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tp_size": 2}, "tp_size: configured 1, wanted 2"),
        ({"device": "cuda", "device_uuid": "GPU-1"}, "device: configured cpu, wanted cuda"),
    ],
)
def test_an_instance_of_another_layout_is_not_filled(fields: dict[str, Any], told: str) -> None:
    order = LoadOrder(generation=1, config=_config())
    with pytest.raises(MismatchError, match=told):
        fill._check_order(order, _wanted(**fields), SimpleNamespace(model="m"))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (BrokenPipeError(32, "Broken pipe"), "the daemon of rank 0 ended meanwhile"),
        (TimeoutError("timed out"), "the daemon of rank 0 does not answer"),
        (OSError(28, "No space left on device"), "no space left on device"),
        (MismatchError("storage 0 is another"), "storage 0 is another"),
    ],
    ids=["ended", "silent", "full", "refused"],
)
def test_what_kept_weights_from_being_published_is_told(
    error: WcacheError | OSError, told: str
) -> None:
    found = fill.not_published(error, RankId("", 0))
    assert found.message == f"the weights were read from disk and not published: {told}"


def test_an_instance_of_another_model_is_not_filled() -> None:
    order = LoadOrder(
        generation=1,
        config=msgspec.structs.replace(_config(), layout=LayoutSection(tp=1)),
    )
    fill._check_order(order, _wanted(), SimpleNamespace(model="m"))
    with pytest.raises(MismatchError, match="waits for the model m, this is an other") as raised:
        fill._check_order(order, _wanted(), SimpleNamespace(model="an other"))
    assert raised.value.hint.startswith("wcache up --model 'an other' --loader publish … has it")
    assert is_same_model("m", SimpleNamespace(model="x", served_model_name=["n", "m"]))


def test_python_state_that_loading_changed_comes_back() -> None:
    before, after = Model(), Model()
    state = plain_state(after)
    loose: list[Any] = list(after.parts)
    loose[1].count = 5
    loose[1].shape = (3, 4)
    loose[2].fresh = {"a": [1, None]}  # as post-processing does
    loose[2].handle = object()  # not plain: not carried
    loose[2].nan = float("nan")  # JSON has none
    extras = changed(state, plain_state(after))
    assert extras == {
        "parts.1.count": 5, "parts.1.shape": [3, 4], "parts.2.fresh": {"a": [1, None]}
    }  # fmt: skip
    restore(before, extras)
    first: list[Any] = list(before.parts)
    assert (first[1].count, first[1].shape) == (5, (3, 4))
    assert first[2].fresh == {"a": [1, None]}


def test_a_value_for_what_is_no_module_is_refused() -> None:
    with pytest.raises(WcacheError, match=r"parts\.9\.count"):
        restore(Model(), {"parts.9.count": 1})
    assert Tree(Model()).slot("parts.0.count") is not None
