"""How long a starting vLLM waits for its rank's daemon, without a vLLM."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.places import Places
from tests.tiny_daemon import Question, TinyDaemon
from tests.weights import FINGERPRINT, cached
from wcache.client import Attachment
from wcache.engines.vllm import obtain as module
from wcache.engines.vllm.obtain import obtain, settled
from wcache.engines.vllm.wanted import Wanted
from wcache.errors import NoSuchRankError
from wcache.protocol.messages import AskLoad, Attach, Refused, Reply

# One that waits where it should not waits for ever here.
pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]


@pytest.fixture
def daemon(places: Places) -> Iterator[TinyDaemon]:
    """One that has served, and was stopped."""
    made = TinyDaemon(places.rank())
    made.serve(*cached(torch.nn.Linear(4, 4)))
    made.paths.folder.mkdir(parents=True)
    made.paths.served_file.touch()
    yield made
    made.close()


@pytest.fixture
def wanted(daemon: TinyDaemon) -> Wanted:
    loose: Any = SimpleNamespace(rank=daemon.paths.id, fingerprint=FINGERPRINT)
    made: Wanted = loose
    return made


def waits(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(module, "COMES_BACK_S", seconds)


def test_a_start_waits_once_for_a_daemon_that_stays_away(
    wanted: Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks how much is held first, and loads then."""
    waits(monkeypatch, 0.2)
    assert settled(wanted) is None
    waits(monkeypatch, float("inf"))
    with pytest.raises(NoSuchRankError, match="no daemon answers for rank 0"):
        obtain(wanted, None)


def test_the_next_start_in_the_same_process_waits_anew(
    daemon: TinyDaemon, wanted: Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits(monkeypatch, 0.2)
    assert settled(wanted) is None
    with pytest.raises(NoSuchRankError):
        obtain(wanted, None)
    waits(monkeypatch, float("inf"))
    later = threading.Timer(0.2, daemon.start)
    later.start()
    found = obtain(wanted, None)
    later.join()
    assert isinstance(found, Attachment)
    found.close()


def test_a_daemon_that_dies_while_it_is_asked_who_publishes_is_waited_for(
    daemon: TinyDaemon, wanted: Wanted
) -> None:
    """An engine that took its end for an answer would end itself, or read the disk."""
    asked: list[Question] = []

    def answer(request: Question) -> Reply | None:
        asked.append(request)
        if isinstance(request, AskLoad):
            return None
        if len(asked) == 1:
            return Refused(reason="not_ready", message="rank 0 is empty")
        return daemon.usual(request)

    daemon.answer = answer
    daemon.start()
    found = obtain(wanted, None)
    assert isinstance(found, Attachment)
    found.close()
    assert [type(one) for one in asked] == [Attach, AskLoad, Attach]
