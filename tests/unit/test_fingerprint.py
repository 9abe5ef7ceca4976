"""Comparing fingerprints: two different models are never taken for each other."""

import hashlib

import msgspec
import pytest

from wcache.config import Config, LayoutSection, MemorySection, ModelSection
from wcache.difference import Difference
from wcache.fingerprint import (
    Fingerprint,
    compare,
    differences,
    held_from,
    wanted_by,
)

pytestmark = pytest.mark.unit

SCALARS = [field.name for field in msgspec.structs.fields(Fingerprint) if field.name != "switches"]


def config(**model: object) -> Config:
    section = ModelSection(path="/models/a", content="sha256:aa", hub_id="org/a", revision="r1")
    return Config(
        model=msgspec.structs.replace(section, **model),
        layout=LayoutSection(tp=2, pp=2),
        memory=MemorySection(device="cuda", devices=("GPU-0", "GPU-1", "GPU-2", "GPU-3")),
    )


def with_field(field: str, value: object) -> Fingerprint:
    return msgspec.structs.replace(Fingerprint(), **{field: value})


@pytest.mark.parametrize("field", SCALARS)
def test_a_difference_in_any_wanted_field_is_named(field: str) -> None:
    value: object = 1 if field.endswith(("_size", "_rank")) else "one"
    other: object = 2 if field.endswith(("_size", "_rank")) else "two"
    held = with_field(field, value)
    assert compare(held, with_field(field, value)) == ()
    assert compare(held, with_field(field, other)) == (Difference(field, str(value), str(other)),)


@pytest.mark.parametrize("field", SCALARS)
def test_what_is_wanted_and_not_known_of_the_held_is_a_mismatch(field: str) -> None:
    value: object = 0 if field.endswith(("_size", "_rank")) else "one"
    assert compare(Fingerprint(), with_field(field, value)) == (
        Difference(field, "unknown", str(value)),
    )


@pytest.mark.parametrize("field", SCALARS)
def test_what_is_not_asked_for_is_no_mismatch(field: str) -> None:
    value: object = 0 if field.endswith(("_size", "_rank")) else "one"
    assert compare(with_field(field, value), Fingerprint()) == ()


def test_switches_are_compared_one_by_one() -> None:
    held = Fingerprint(switches={"A": "1", "B": "2", "extra": "x"})
    wanted = Fingerprint(switches={"A": "1", "B": "3", "C": "4"})
    assert [str(found) for found in compare(held, wanted)] == [
        "switches.B: cached 2, wanted 3",
        "switches.C: cached not set, wanted 4",
        "switches.extra: cached x, wanted not set",
    ]


def test_an_engine_without_switches_does_not_take_weights_that_were_made_with_one() -> None:
    held = Fingerprint(switches={"A": "1"})
    assert [str(found) for found in compare(held, Fingerprint(switches={}))] == [
        "switches.A: cached 1, wanted not set"
    ]
    assert compare(held, Fingerprint()) == ()


def test_switches_that_nobody_knows_are_a_mismatch_with_any() -> None:
    for wanted, told in (({}, "none"), ({"B": "2", "A": "1"}, "A=1, B=2")):
        found = compare(Fingerprint(), Fingerprint(switches=wanted))
        assert found == (Difference("switches", "unknown", told),)


def test_the_digest_knows_every_field_and_no_order() -> None:
    digests = {Fingerprint().digest()}
    for field in SCALARS:
        value: object = 1 if field.endswith(("_size", "_rank")) else "one"
        digests.add(with_field(field, value).digest())
    digests.add(Fingerprint(switches={"A": "1"}).digest())
    assert len(digests) == len(SCALARS) + 2
    one = Fingerprint(switches={"A": "1", "B": "2"})
    assert one.digest() == Fingerprint(switches={"B": "2", "A": "1"}).digest()


def test_what_was_loaded_for_a_configuration_is_what_it_wants() -> None:
    for rank in range(4):
        held = held_from(config(), rank, architecture="Llama", torch_version="2.13")
        assert compare(held, wanted_by(config(), rank)) == ()


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        (config(content="sha256:bb"), "content"),
        (config(dtype="float16"), "dtype"),
        (msgspec.structs.replace(config(), layout=LayoutSection(tp=4)), "tp_size"),
        (
            msgspec.structs.replace(
                config(),
                memory=MemorySection(device="cuda", devices=("GPU-9", "GPU-1", "GPU-2", "GPU-3")),
            ),
            "device_uuid",
        ),
        (msgspec.structs.replace(config(), memory=MemorySection()), "device"),
    ],
)
def test_another_configuration_wants_other_weights(changed: Config, field: str) -> None:
    held = held_from(config(), 0)
    assert field in [found.field for found in compare(held, wanted_by(changed, 0))]


def test_a_shard_of_one_rank_is_not_taken_for_that_of_another() -> None:
    for rank in range(4):
        for other in range(4):
            found = compare(held_from(config(), rank), wanted_by(config(), other))
            assert (found == ()) == (rank == other)


def test_names_for_people_decide_nothing() -> None:
    """The same bytes under another path are the same weights."""
    moved = config(path="/elsewhere", hub_id=None, revision=None)
    assert compare(held_from(config(), 0), wanted_by(moved, 0)) == ()


def test_an_engine_that_publishes_decides_on_layout_and_dtype() -> None:
    wanted = wanted_by(config(loader="publish", path="mine"), 1)
    engine = Fingerprint(model="mine", loader="publish", device="cuda", tp_size=7, dtype="odd")
    assert compare(engine, wanted) == ()
    other = msgspec.structs.replace(engine, model="yours")
    assert [found.field for found in compare(other, wanted)] == ["model"]


LOADED = held_from(config(), 0, architecture="Llama", torch_version="2.13", quantization="fp8")
PUBLISHED = Fingerprint(
    model="mine", loader="publish", device="cuda", dtype="bfloat16", tp_size=1, tp_rank=0,
    torch_version="2.13", engine="vllm", engine_version="0.32.0", switches={"A": "1"},
)  # fmt: skip


@pytest.mark.parametrize("held", [LOADED, PUBLISHED], ids=["loaded", "published"])
def test_held_weights_are_the_same_as_themselves(held: Fingerprint) -> None:
    assert differences(held, held) == ()


@pytest.mark.parametrize(
    ("field", "decides"),
    [
        ("content", True), ("architecture", True), ("loader", True), ("dtype", True),
        ("quantization", True), ("quantization_config", True), ("tp_size", True),
        ("tp_rank", True), ("pp_rank", True), ("ep_rank", True), ("device", True),
        ("device_uuid", True), ("model", False), ("revision", False), ("loader_version", False),
        ("torch_version", False), ("device_capability", False), ("dp_rank", False),
        ("node_rank", False),
    ],
)  # fmt: skip
def test_of_weights_read_from_a_checkpoint_the_content_decides_and_no_name(
    field: str, decides: bool
) -> None:
    value: object = 7 if field.endswith(("_size", "_rank")) else "other"
    other = msgspec.structs.replace(LOADED, **{field: value})
    for one, two in ((LOADED, other), (other, LOADED)):
        assert [found.field for found in differences(one, two)] == ([field] if decides else [])


@pytest.mark.parametrize(
    "field",
    ["model", "dtype", "tp_size", "torch_version", "engine", "engine_version", "dp_rank",
     "device_capability"],
)  # fmt: skip
def test_of_published_weights_everything_decides_that_an_engine_may_have_looked_at(
    field: str,
) -> None:
    value: object = 7 if field.endswith(("_size", "_rank")) else "other"
    for changed in (value, None):
        other = msgspec.structs.replace(PUBLISHED, **{field: changed})
        expected = [field] if getattr(PUBLISHED, field) != changed else []
        assert [found.field for found in differences(PUBLISHED, other)] == expected
        assert [found.field for found in differences(other, PUBLISHED)] == expected


def test_differences_are_told_from_the_first_to_the_second_in_the_order_of_the_fields() -> None:
    other = msgspec.structs.replace(PUBLISHED, dtype=None, engine=None, switches={"B": "2"})
    assert differences(PUBLISHED, other) == (
        Difference("dtype", "bfloat16", "unknown"),
        Difference("engine", "vllm", "unknown"),
        Difference("switches.A", "1", "not set"),
        Difference("switches.B", "not set", "2"),
    )


def test_the_digest_of_weights_without_switches_is_what_it_was() -> None:
    """A daemon of the last version wrote it into ``rank.ready``."""
    assert Fingerprint(model="m").digest() == (
        "sha256:" + hashlib.sha256(b'{"model":"m"}').hexdigest()
    )
