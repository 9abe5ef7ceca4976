"""Whatever happens to a rank, in whatever order: no weights are lost, mixed or kept for ever."""

import gc
import os
from collections.abc import Iterator

import pytest

from tests.changeover import model
from tests.life.body import Body, Engine
from tests.life.keeper import Clock
from tests.life.steps import LEASE, live
from tests.places import publish_config
from tests.publishing import SLAB_BYTES
from wcache.daemon import holdings, load, rank, reclaim, safekeeping
from wcache.manifest import SlabInfo
from wcache.protocol.messages import (
    AskAgain,
    AskLoad,
    Attach,
    Checked,
    CheckOrder,
    LoadOrder,
    Offer,
    Offered,
    Published,
    Release,
    Stage,
    Switch,
)
from wcache.state import RankState

pytestmark = pytest.mark.unit

# With many more, as before a release: LIVES=20000 scripts/test.sh tests/unit/test_rank_life.py
SLAB = SlabInfo(kind="host", nbytes=SLAB_BYTES)
LIVES = int(os.environ.get("LIVES", "150"))


@pytest.fixture(autouse=True, scope="module")
def no_garbage() -> Iterator[None]:
    """Descriptors are counted: nothing else may close any meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def body(clock: Clock) -> Iterator[Body]:
    made = Body(clock)
    made.write_config("a")
    made.start()
    yield made
    made.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (holdings, load, rank, reclaim, safekeeping):
        monkeypatch.setattr(module, "time", made)
    # Nobody here loses power.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    return made


@pytest.mark.parametrize("seed", range(LIVES))
def test_no_weights_are_lost_mixed_or_leaked(seed: int, clock: Clock) -> None:
    live(seed, clock)


def test_weights_that_serve_again_are_not_loaded_beside_themselves(body: Body) -> None:
    """Generation 2 was never stored, and what was to follow it is generation 1 once more."""
    load_into(body, "a")
    body.alive.change(Stage(config=model("b")))
    body.keeper.listens = False
    load_into(body, "b")
    body.keeper.listens = True
    body.alive.change(Switch(generation=2, keep_old=True))
    body.alive.change(Stage(config=model("a")))
    assert body.kept().candidate == model("a")
    body.restart(body.kept())
    assert [held.role for held in body.alive.report().generations] == ["serving"]
    assert (body.kept().candidate, body.kept().held) == (None, "")


def test_a_supervisor_that_listens_again_is_given_the_served_generation_first(body: Body) -> None:
    body.keeper.listens = False
    load_into(body, "a")
    for letter, number in (("b", 2), ("c", 3)):
        body.alive.change(Stage(config=model(letter)))
        load_into(body, letter)
        body.alive.change(Switch(generation=number))
    body.keeper.listens = True
    body.clock.now += safekeeping.AGAIN_S
    body.alive.store_what_is_not()
    manifests = [name for name in body.keeper.names if name.endswith("manifest")]
    assert manifests == ["g3.manifest", "g1.manifest", "g2.manifest"]
    assert body.all_is_stored()


def test_a_supervisor_that_is_slow_is_given_one_generation_at_a_time(body: Body) -> None:
    body.keeper.listens = False
    load_into(body, "a")
    body.alive.change(Stage(config=model("b")))
    load_into(body, "b")
    body.keeper.listens = True
    body.keeper.takes_s = 2 * safekeeping.TURN_S
    body.clock.now += safekeeping.AGAIN_S
    for count in (1, 2):
        body.alive.store_what_is_not()
        assert len([name for name in body.keeper.names if name.endswith("manifest")]) == count
        body.clock.now += safekeeping.TURN_S
    body.alive.store_what_is_not()
    assert body.all_is_stored()


def test_a_full_store_hears_what_was_freed_before_it_is_given_more(body: Body) -> None:
    load_into(body, "a", slabs=3)
    body.keeper.room = len(body.keeper.names)
    body.keeper.listens = False
    body.alive.change(Release(roles=("serving",)))
    load_into(body, "a", slabs=3)
    body.keeper.listens = True
    for _ in range(3):
        body.clock.now += safekeeping.AGAIN_S
        body.alive.store_what_is_not()
    body.check_settled()


def test_a_damaged_offer_ends_no_daemon_whose_publisher_failed_before(body: Body) -> None:
    load_into(body, "a")
    _, fds = body.alive.attach(body.new_peer(), LEASE, Attach())
    engine = [os.dup(fd) for fd in fds]
    slabs = body.alive.report().generations[0].slabs
    body.keeper.lose()
    body.is_safe = False
    body.engines.append(Engine(body.kept().served, engine, (SLAB,) * slabs, None))
    body.places.write_config(publish_config())
    body.restart(body.kept())
    assert isinstance(body.alive.ask_load(7, 1, AskLoad(source="engine")), LoadOrder)
    body.alive.peer_gone(7)
    body.write_config("a")
    body.alive.report()
    offer = Offer(slabs=(SLAB,) * slabs)
    fds = [os.dup(fd) for fd in engine]
    assert isinstance(body.alive.offer(LEASE, offer, fds, trusted=True), Offered)
    assert isinstance(body.alive.ask_load(8, 1, AskLoad()), CheckOrder)
    assert isinstance(body.alive.checked(8, Checked(problem="damaged")), AskAgain)
    assert body.alive.state is RankState.EMPTY
    assert isinstance(body.alive.ask_load(8, 1, AskLoad()), LoadOrder)


def load_into(body: Body, letter: str, *, slabs: int = 1) -> None:
    assert isinstance(body.alive.ask_load(body.loader, os.getpid(), AskLoad()), LoadOrder)
    assert isinstance(body.publish(model(letter), slabs=slabs)[1], Published)
