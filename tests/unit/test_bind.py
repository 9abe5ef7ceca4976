"""Binding a module on the meta device: what becomes a view, what a copy, and what is refused."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from tests.weights import cached, mapped
from wcache.client.bind import bind
from wcache.client.views import views
from wcache.errors import WcacheError
from wcache.manifest import Manifest, Tensor

pytestmark = pytest.mark.unit


class Cached:
    """A module's tensors, mapped for reading."""

    def __init__(self, module: nn.Module, extras: dict[str, Any] | None = None) -> None:
        self.manifest, slabs = cached(module, extras=extras)
        self.mapping = mapped(self.manifest, slabs)
        self.tensors = views(self.manifest, self.mapping.tensor())

    def bind(self, module: nn.Module, **options: Any) -> None:
        bind(module, self.manifest, self.tensors, **options)

    def change(self, name: str, **fields: Any) -> None:
        """Has the manifest say something else of the tensor ``name``."""
        self.manifest = msgspec.structs.replace(
            self.manifest,
            tensors=tuple(
                msgspec.structs.replace(t, **fields) if t.name == name else t
                for t in self.manifest.tensors
            ),
        )
        self.tensors = views(self.manifest, self.mapping.tensor())

    def holds(self, tensor: torch.Tensor) -> bool:
        start = self.mapping.address
        return start <= tensor.data_ptr() < start + self.mapping.nbytes


@pytest.fixture
def keep() -> Iterator[Callable[..., Cached]]:
    """Makes :class:`Cached` and closes what it has mapped."""
    made: list[Cached] = []

    def make(module: nn.Module, **options: Any) -> Cached:
        made.append(Cached(module, **options))
        return made[-1]

    yield make
    for one in made:
        one.mapping.close()


Keep = Callable[..., Cached]


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


class Engine(nn.Module):
    """Parameters, buffers of both kinds and plain attributes, as engines have them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)
        self.turned = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
        self.scale = torch.tensor(0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(ids)) * self.frequencies * self.scale
        return self.head(hidden) @ self.embed.weight @ self.turned  # type: ignore[no-any-return]  # nn.Module's call is untyped


def test_bound_module_computes_what_the_published_one_does(keep: Keep) -> None:
    engine = Engine().eval()
    bound = on_meta(Engine).eval()
    keep(engine).bind(bound)
    ids = torch.arange(6)
    with torch.no_grad():
        assert torch.equal(bound(ids), engine(ids))


def test_parameters_are_views_and_need_no_gradient(keep: Keep) -> None:
    weights, bound = keep(Engine()), on_meta(Engine)
    weights.bind(bound)
    names = [name for name, parameter in bound.named_parameters() if weights.holds(parameter)]
    assert names == [name for name, _ in Engine().named_parameters()]
    assert not any(parameter.requires_grad for parameter in bound.parameters())
    assert bound.get_parameter("turned").stride() == (1, 4)


def test_ties_stay_ties(keep: Keep) -> None:
    bound = on_meta(Engine)
    keep(Engine()).bind(bound)
    assert bound.get_parameter("head.weight") is bound.get_parameter("embed.weight")


def test_tie_that_only_the_module_knows_is_kept(keep: Keep) -> None:
    """A checkpoint has the embedding alone, and the module's head is the same object."""
    alone = Engine()
    del alone.head.weight
    bound = on_meta(Engine)
    weights = keep(alone)
    weights.bind(bound)
    assert bound.get_parameter("head.weight") is bound.get_parameter("embed.weight")
    assert weights.holds(bound.get_parameter("head.weight"))


def test_tie_that_only_the_cache_knows_is_made(keep: Keep) -> None:
    class Apart(Engine):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = nn.Parameter(torch.zeros(8, 4))

    bound = on_meta(Apart)
    keep(Engine()).bind(bound)
    assert bound.get_parameter("head.weight") is bound.get_parameter("embed.weight")


def test_module_that_is_there_twice_stays_one(keep: Keep) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(2, 2)
            self.other = self.one

    bound = on_meta(Twice)
    source = Twice()
    keep(source).bind(bound)
    assert bound.get_parameter("one.weight") is bound.get_parameter("other.weight")
    assert torch.equal(bound.get_parameter("one.weight"), source.one.weight)


def test_buffers_and_attributes_are_private_and_can_be_written_to(keep: Keep) -> None:
    weights, bound = keep(Engine()), on_meta(Engine)
    weights.bind(bound)
    for name in ("norm.running_mean", "frequencies"):
        buffer = bound.get_buffer(name)
        assert not weights.holds(buffer)
        buffer.add_(1)
    bound.scale.mul_(2)  # type: ignore[operator]  # an attribute of nn.Module may be anything
    assert torch.equal(weights.tensors["frequencies"], torch.arange(4.0))
    assert weights.tensors["scale"] == 0.5


def test_persistence_of_buffers_is_that_of_the_published_module(keep: Keep) -> None:
    class Persistent(Engine):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.zeros(4), persistent=True)

    bound = on_meta(Persistent)
    keep(Engine()).bind(bound)
    assert "frequencies" not in bound.state_dict()
    assert bound.state_dict().keys() == Engine().state_dict().keys()


def test_buffer_that_is_none_until_it_is_loaded_is_filled(keep: Keep) -> None:
    class Late(nn.Module):
        def __init__(self, value: torch.Tensor | None) -> None:
            super().__init__()
            self.register_buffer("late", value)

    bound = on_meta(lambda: Late(None))
    keep(Late(torch.ones(3))).bind(bound)
    assert torch.equal(bound.get_buffer("late"), torch.ones(3))


def test_checkpoint_does_not_know_what_is_a_buffer(keep: Keep) -> None:
    """Its tensors all come as parameters; the module says what they are."""
    weights = keep(Engine())
    for name in ("norm.running_mean", "frequencies"):
        weights.change(name, kind="parameter", persistent=True)
    bound = on_meta(Engine)
    weights.bind(bound)
    assert not weights.holds(bound.get_buffer("norm.running_mean"))
    assert "norm.running_mean" in bound.state_dict()
    assert "frequencies" not in bound.state_dict()


def test_copies_keep_strides_and_what_they_share(keep: Keep) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            base = torch.arange(1000, dtype=torch.int64)
            rows = base[100:400].view(10, 30)
            self.register_buffer("rows", rows)
            self.register_buffer("columns", base[100:400].view(10, 30).t())
            self.column = base[130:400:30]
            self.bytes = base[100:400].view(torch.uint8)[3:]
            # Begins before the others, at no multiple of their 8 bytes.
            self.early = base[50:100].view(torch.uint8)[5:]
            self.register_buffer("none", base[:0].view(0, 7))
            self.register_buffer("same", rows)

    source, bound = Shared(), on_meta(Shared)
    weights = keep(source)
    weights.bind(bound)
    for name in ("rows", "columns", "column", "bytes", "early", "none"):
        got, want = getattr(bound, name), getattr(source, name)
        assert torch.equal(got, want), name
        assert got.stride() == want.stride()
    assert bound.get_buffer("same") is bound.get_buffer("rows")
    bound.get_buffer("columns")[0, 1] = -1
    assert bound.get_buffer("rows")[1, 0] == -1
    assert bound.column[0] == -1  # type: ignore[index]  # an attribute of nn.Module may be anything
    # 350 of the 1,000 elements are reached, and the hull is cut to the alignment of storages.
    assert bound.get_buffer("rows").untyped_storage().nbytes() <= 350 * 8 + 512


def test_scalars_and_empty_tensors_are_bound(keep: Keep) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(1.5))
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.register_buffer("count", torch.tensor(7))
            self.register_buffer("nothing", torch.zeros(2, 0))

    bound = on_meta(Small)
    keep(Small()).bind(bound)
    assert bound.get_parameter("scalar").item() == 1.5
    assert bound.get_buffer("count").item() == 7
    assert bound.get_parameter("empty").shape == (0, 3)
    assert bound.get_buffer("nothing").shape == (2, 0)


def test_cached_dtype_wins(keep: Keep) -> None:
    bound = on_meta(lambda: nn.Linear(3, 2))
    keep(nn.Linear(3, 2).to(torch.bfloat16)).bind(bound)
    assert bound.get_parameter("weight").dtype == torch.bfloat16


# --- parameter classes ------------------------------------------------------------------------


class Sharded(nn.Parameter):
    """As engines have them: a constructor of its own, and state in attributes and properties."""

    def __new__(cls, shape: tuple[int, int], loader: Callable[[], str]) -> "Sharded":
        made = super().__new__(cls, torch.ones(shape), requires_grad=False)
        made._loader = loader
        return made

    _loader: Callable[[], str]

    @property
    def loader(self) -> Callable[[], str]:
        return self._loader


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Sharded((2, 3), lambda: "of the engine")


def test_class_and_attributes_of_a_parameter_are_kept(keep: Keep) -> None:
    bound = on_meta(Layer)
    assert isinstance(bound, Layer)
    bound.weight.input_dim = 1  # type: ignore[attr-defined]  # engines set what they like
    weights = keep(nn.Linear(3, 2, bias=False))
    weights.bind(bound)
    assert type(bound.weight) is Sharded
    assert bound.weight.loader() == "of the engine"
    assert vars(bound.weight)["input_dim"] == 1
    assert weights.holds(bound.weight)


class Wrapped(nn.Parameter):
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None


def test_parameter_that_wraps_other_tensors_is_refused(keep: Keep) -> None:
    bound = on_meta(lambda: nn.Linear(3, 2, bias=False))
    bound.weight = Wrapped(torch.empty(2, 3, device="meta"))
    with pytest.raises(WcacheError, match="weight is a Wrapped, which wraps other tensors"):
        keep(nn.Linear(3, 2, bias=False)).bind(bound)


def test_lazy_parameter_is_refused(keep: Keep) -> None:
    bound = on_meta(lambda: nn.LazyLinear(2, bias=False))
    with pytest.raises(WcacheError, match="weight is a lazy parameter"):
        keep(nn.Linear(3, 2, bias=False)).bind(bound)


# --- what does not fit ------------------------------------------------------------------------


def assert_untouched(module: nn.Module) -> None:
    assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def test_other_shape_is_named(keep: Keep) -> None:
    bound = on_meta(lambda: nn.Linear(4, 2))
    with pytest.raises(WcacheError) as raised:
        keep(nn.Linear(3, 2)).bind(bound)
    assert raised.value.message == (
        "Linear can not be bound: weight is cached as [2, 3] and is [2, 4] in the module"
    )
    assert_untouched(bound)


def test_cached_and_not_in_the_module_is_counted_and_named(keep: Keep) -> None:
    source = nn.ModuleDict({f"m{number}": nn.Linear(2, 2, bias=False) for number in range(8)})
    bound = on_meta(lambda: nn.ModuleDict({"m0": nn.Linear(2, 2, bias=False)}))
    with pytest.raises(WcacheError) as raised:
        keep(source).bind(bound)
    assert raised.value.message == (
        "7 tensors are cached and not in ModuleDict:"
        " m1.weight, m2.weight, m3.weight, m4.weight, m5.weight and 2 more"
    )
    assert_untouched(bound)


def test_bias_that_the_module_goes_without_is_absent(keep: Keep) -> None:
    bound = on_meta(lambda: nn.Linear(3, 2, bias=False))
    with pytest.raises(WcacheError, match="1 tensor is cached and not in Linear: bias"):
        keep(nn.Linear(3, 2)).bind(bound)


class Left(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("table", torch.zeros(3), persistent=False)
        self.plain = torch.zeros(2)


def test_what_stays_on_meta_is_named(keep: Keep) -> None:
    bound = on_meta(Left)
    with pytest.raises(WcacheError) as raised:
        keep(nn.Linear(3, 2, bias=False)).bind(bound)
    assert raised.value.message == (
        "3 tensors are in the module and not cached: bias, table, plain"
    )
    assert_untouched(bound)


@pytest.mark.parametrize(
    "allowed", [{"bias", "table", "plain"}, ["bias", "table", "plain"], lambda name: name != "x"]
)
def test_what_may_be_missing_stays_on_meta(keep: Keep, allowed: Any) -> None:
    bound = on_meta(Left)
    keep(nn.Linear(3, 2, bias=False)).bind(bound, allow_missing=allowed)
    assert not bound.get_parameter("weight").is_meta
    assert bound.get_parameter("bias").is_meta


def test_what_has_content_already_may_be_missing(keep: Keep) -> None:
    bound = on_meta(Left)
    assert isinstance(bound, Left)
    bound.table = torch.ones(3)
    bound.plain = torch.ones(2)
    keep(nn.Linear(3, 2)).bind(bound)
    assert torch.equal(bound.get_buffer("table"), torch.ones(3))


@pytest.mark.parametrize(
    ("cached_kind", "name"), [("buffer", "weight"), ("attribute", "weight"), ("attribute", "table")]
)
def test_other_kind_is_refused(keep: Keep, cached_kind: str, name: str) -> None:
    weights = keep(Left())
    weights.change(name, kind=cached_kind)
    with pytest.raises(WcacheError, match=f"{name} is cached as {cached_kind} and is a"):
        weights.bind(on_meta(Left))


# --- what a manifest must not set -------------------------------------------------------------


class Guarded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2)
        self.hook = len
        self.ratio = 1.0
        self.pair = (1, 2)

    limit = 5

    @property
    def computed(self) -> int:
        return 1

    def method(self) -> int:
        return 2


HOSTILE = [
    "__class__", "__dict__", "child.__class__", "_parameters", "_modules", "child._buffers",
    "training", "forward", "method", "computed", "child", "hook", "state_dict", "",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_attribute_that_is_code_or_a_registry_is_not_replaced_by_a_tensor(
    keep: Keep, name: str
) -> None:
    weights = keep(Guarded())
    tensor = weights.manifest.tensors[0]
    _add(weights, msgspec.structs.replace(tensor, name=name, kind="attribute"))
    bound = on_meta(Guarded)
    with pytest.raises(WcacheError, match="is no attribute that a manifest may set"):
        weights.bind(bound)
    assert_untouched(bound)


@pytest.mark.parametrize("name", ["child.forward.__globals__.x", "method.__self__", "absent.x"])
def test_names_lead_through_modules_only(keep: Keep, name: str) -> None:
    weights = keep(Guarded())
    _add(weights, msgspec.structs.replace(weights.manifest.tensors[0], name=name, kind="attribute"))
    with pytest.raises(WcacheError, match="1 tensor is cached and not in Guarded"):
        weights.bind(on_meta(Guarded))


def _add(weights: Cached, tensor: Tensor) -> None:
    tensors = (*weights.manifest.tensors, tensor)
    weights.manifest = msgspec.structs.replace(weights.manifest, tensors=tensors)
    weights.tensors = views(weights.manifest, weights.mapping.tensor())


HOSTILE_EXTRAS = [
    *HOSTILE, "child.weight", "child.weight.data", "child.weight.grad", "child.weight.__class__",
    "child.weight.", "child.weight.T", "a.b.c",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_EXTRAS)
def test_extra_that_is_not_plain_data_is_refused(keep: Keep, name: str) -> None:
    bound = on_meta(Guarded)
    with pytest.raises(WcacheError, match="is no value that a manifest may set"):
        keep(Guarded(), extras={name: 1}).bind(bound)
    assert_untouched(bound)


def test_extras_are_set_on_modules_and_on_tensors(keep: Keep) -> None:
    extras = {
        "ratio": 0.25,
        "pair": [3, 4],
        "limit": 9,
        "new": {"a": [1, None]},
        "child.weight.layout_done": True,
    }
    bound = on_meta(Guarded)
    assert isinstance(bound, Guarded)
    keep(Guarded(), extras=extras).bind(bound)
    assert (bound.ratio, bound.pair, bound.limit) == (0.25, (3, 4), 9)
    assert bound.new == {"a": [1, None]}
    assert vars(bound.child.weight)["layout_done"] is True
    assert Guarded.limit == 5


def test_manifest_of_nothing_that_the_module_has_is_refused(keep: Keep) -> None:
    weights = keep(nn.Linear(2, 2))
    empty = msgspec.structs.replace(weights.manifest, tensors=())
    assert isinstance(empty, Manifest)
    with pytest.raises(WcacheError, match="2 tensors are in the module and not cached"):
        bind(on_meta(lambda: nn.Linear(2, 2)), empty, {})
