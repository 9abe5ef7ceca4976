"""Whatever happens to a rank, in whatever order: no weights are lost, mixed or kept for ever."""

import os

import pytest

from tests.changeover import model
from tests.life.body import Body
from tests.life.keeper import Clock
from tests.life.steps import live
from wcache.daemon import holdings, load, rank, reclaim, safekeeping
from wcache.protocol.messages import AskLoad, LoadOrder, Published, Stage, Switch

pytestmark = pytest.mark.unit

# With many more, as before a release: LIVES=20000 scripts/test.sh tests/unit/test_rank_life.py
LIVES = int(os.environ.get("LIVES", "150"))


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


def test_weights_that_serve_again_are_not_loaded_beside_themselves(clock: Clock) -> None:
    """Generation 2 was never stored, and what was to follow it is generation 1 once more."""
    body = Body(clock)
    try:
        body.write_config("a")
        body.start()
        load_into(body, "a")
        body.alive.change(Stage(config=model("b")))
        body.keeper.listens = False
        load_into(body, "b")
        body.keeper.listens = True
        body.alive.change(Switch(generation=2))
        body.alive.change(Stage(config=model("a")))
        assert body.kept().candidate == model("a")
        body.restart(body.kept())
        serving = body.alive.report().serving
        assert serving is not None
        assert serving.number == 1
        assert body.kept().candidate is None
    finally:
        body.close()


def load_into(body: Body, letter: str) -> None:
    assert isinstance(body.alive.ask_load(body.loader, os.getpid(), AskLoad()), LoadOrder)
    assert isinstance(body.publish(model(letter))[1], Published)
