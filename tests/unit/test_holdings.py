"""Who holds how much of which device."""

import msgspec
import pytest

from tests.cli.views import GIB, config, report
from tests.daemons import Start, published
from tests.places import Places, publish_config
from tests.processes import Store
from wcache.fingerprint import held_from
from wcache.holdings import Holding, Others, held_by, held_words
from wcache.paths import RankId

ONE = RankId("draft", 0)


@pytest.mark.unit
def test_generations_on_one_device_are_added_up() -> None:
    held = held_from(config(), 0)
    on_gpu = msgspec.structs.replace(held, device="cuda", device_uuid="GPU-a")
    told = report(0, held=on_gpu)
    (generation,) = told.generations
    host = msgspec.structs.replace(generation, fingerprint=held, slab_bytes=7)
    told = msgspec.structs.replace(told, generations=(generation, generation, host))
    assert held_by(ONE, told) == [
        Holding(id=ONE, device="GPU-a", nbytes=2 * GIB),
        Holding(id=ONE, device="cpu", nbytes=7),
    ]


@pytest.mark.unit
def test_instances_are_named_the_largest_first() -> None:
    found = [
        Holding(id=RankId("", 0), device="cpu", nbytes=GIB),
        Holding(id=RankId("draft", 0), device="cpu", nbytes=GIB),
        Holding(id=RankId("draft", 1), device="cpu", nbytes=GIB),
    ]
    assert held_words(found) == "instance draft holds 2.0 GiB, the default instance holds 1.0 GiB"


@pytest.mark.process
def test_daemons_of_other_instances_are_asked(places: Places, store: Store, start: Start) -> None:
    places.write_config(publish_config())
    start(ready=False)
    store.serve(lambda: places.rank().socket.exists())
    published(places, store, [b"weights"])
    # What is left of a daemon that was killed, and what is no rank at all, hold nothing.
    for name in ("other:0", "other:supervisor"):
        (places.root / "run" / name).mkdir()
        (places.root / "run" / name / "control.sock").touch()
    assert list(Others(places.instance("draft"))) == [
        Holding(id=RankId("", 0), device="cpu", nbytes=2 << 20)
    ]
    assert list(Others(places.instance())) == []
