"""Whatever happens to a rank, in whatever order: no weights are lost, mixed or kept for ever."""

import os

import pytest

from tests.life.keeper import Clock
from tests.life.steps import live
from wcache.daemon import holdings, load, rank, reclaim, safekeeping

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
