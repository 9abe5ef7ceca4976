"""Comparing fingerprints: two different models are never taken for each other."""

import msgspec
import pytest

from wcache.config import Config, LayoutSection, MemorySection, ModelSection
from wcache.fingerprint import Difference, Fingerprint, compare, held_from, wanted_by

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
        "switches.C: cached unknown, wanted 4",
    ]


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
