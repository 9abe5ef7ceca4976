"""A daemon that comes up empty takes its generation back from an engine that still maps it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
import torch

import wcache
from tests.daemons import Start, report
from tests.places import Places, publish_config
from tests.processes import Store, end, open_files, settled_files, wait_for
from tests.reclaiming import WEIGHTS, Loss
from wcache.client import Attachment
from wcache.errors import NotReadyError, TryAgainError, WcacheError
from wcache.protocol.control import Control
from wcache.protocol.messages import (
    AskAgain,
    AskLoad,
    Checked,
    CheckOrder,
    Leased,
    LoadOrder,
    NothingToLoad,
    Offered,
    OfferWanted,
    Published,
    Renew,
)
from wcache.protocol.wire import close_all
from wcache.served import read_served
from wcache.state import RankState

pytestmark = pytest.mark.process


@pytest.fixture
def loss(places: Places, store: Store, start: Start) -> Iterator[Loss]:
    places.write_config(publish_config())
    made = Loss(places, store, start)
    yield made
    made.close()


def is_right(attachment: Attachment) -> bool:
    return [bytes(attachment.tensors[f"t{index}"].tolist()) for index in (0, 1)] == list(WEIGHTS)


def test_a_live_engine_gives_the_generation_back_and_has_its_lease_again(
    places: Places, store: Store, loss: Loss
) -> None:
    before = report(places).serving
    assert before is not None
    with wcache.attach() as attachment:
        loss.lose()
        assert loss.load() == 0
        wait_for(lambda: attachment.lease_state == "held", "the lease is renewed")
        after = report(places)
        assert after.state is RankState.READY
        assert after.serving is not None
        assert after.serving.how == "reclaimed"
        assert after.serving.number == before.number == attachment.generation
        assert after.serving.manifest_digest == before.manifest_digest
        assert [lease.pid for lease in after.leases] == [os.getpid()]
        assert after.problems == ()
        assert {"g1.slab.0", "g1.slab.1", "g1.manifest"} < store.fds.keys()
        assert is_right(attachment)
        with wcache.attach() as another:
            assert is_right(another)
    assert "nothing read from disk" in loss.log()
    assert "was given back by an engine, and is right" in loss.log("loader")


def test_what_was_reclaimed_is_kept_over_a_restart_and_can_be_lost_again(
    places: Places, store: Store, start: Start, loss: Loss
) -> None:
    with wcache.attach() as attachment:
        for _ in range(2):
            loss.lose()
            assert "given back by an engine" in loss.check()
            wait_for(lambda: attachment.lease_state == "held", "the lease is renewed")
        end(loss.daemon, signal.SIGTERM)
        loss.daemon = start()
        serving = report(places).serving
        assert serving is not None
        assert (serving.how, serving.manifest_digest) == ("adopted", loss.digest)


def test_the_first_of_two_engines_gives_it_back_and_the_second_just_renews(
    places: Places, loss: Loss
) -> None:
    with wcache.attach() as first, wcache.attach() as second:
        loss.lose()
        assert "given back by an engine" in loss.check()
        for attachment in (first, second):
            wait_for(lambda a=attachment: a.lease_state == "held", "the lease is renewed")  # type: ignore[misc]  # mypy has no type for a lambda with a default
        assert len(report(places).leases) == 2
    assert loss.log().count("gives generation 1 back") == 1


def test_an_engine_that_ends_after_its_offer_is_not_needed_any_more(
    places: Places, loss: Loss
) -> None:
    loss.lose()
    assert isinstance(loss.offer(), Offered)
    close_all(loss.fds)
    loss.fds = []
    assert "gives generation 1 back, waiting for the loader" in report(places).status
    assert "given back by an engine" in loss.check()
    with wcache.attach() as attachment:
        assert is_right(attachment)


def test_an_offer_that_comes_late_waits_for_the_next_loader(places: Places, loss: Loss) -> None:
    """Where an engine publishes nothing is read meanwhile: any later loader will do."""
    loss.lose()
    assert "the first engine publishes" in loss.check()
    assert report(places).state is RankState.EMPTY
    assert isinstance(loss.offer(), Offered)
    assert "given back by an engine" in loss.check()
    assert report(places).state is RankState.READY


def test_nobody_is_waited_for_when_the_last_engine_has_ended(places: Places, loss: Loss) -> None:
    code = "import sys, wcache; held = wcache.attach(); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **places.environment},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as engine:  # fmt: skip
        try:
            assert engine.stdout is not None
            engine.stdout.readline()
            recorded = places.rank().served_file

            def is_recorded() -> bool:
                served = read_served(recorded)
                return served is not None and served.leases == (engine.pid,)

            wait_for(is_recorded, "the lease is recorded")
            loss.lose()
            with Control.connect(places.rank(), "loader") as loader:
                assert isinstance(loader.request(AskLoad(), AskAgain), AskAgain)
        finally:
            end(engine)
    loss.lose()
    with Control.connect(places.rank(), "loader") as loader:
        loader.request(AskLoad(), NothingToLoad)


def test_an_engine_of_another_configuration_is_refused_and_named(
    places: Places, loss: Loss
) -> None:
    config = publish_config()
    other = msgspec.structs.replace(config.model, path="next-model")
    places.write_config(msgspec.structs.replace(config, model=other))
    with wcache.attach() as attachment:
        loss.lose()
        wait_for(lambda: attachment.lease_state.startswith("lost: "), "the lease is lost")
        assert is_right(attachment)
    (problem,) = report(places).problems
    assert problem.startswith(f"pid {os.getpid()} (")
    assert "model: cached test-model, wanted next-model" in problem
    assert problem in loss.log()


def test_a_configuration_that_changes_after_an_offer_refuses_it(places: Places, loss: Loss) -> None:
    loss.lose()
    assert isinstance(loss.offer(), Offered)
    config = publish_config()
    other = msgspec.structs.replace(config.model, path="next-model")
    places.write_config(msgspec.structs.replace(config, model=other))
    with Control.connect(places.rank(), "loader") as loader:
        loader.request(AskLoad(source="engine"), LoadOrder)
    assert "wanted next-model" in report(places).problems[0]


def test_a_configuration_that_changes_during_the_check_refuses_it_too(
    places: Places, loss: Loss
) -> None:
    loss.lose()
    loss.offer()
    with Control.connect(places.rank(), "loader") as loader:
        order = loader.request(AskLoad(), CheckOrder)
        close_all(loader.take_fds(1 + len(order.slabs)))
        config = publish_config()
        other = msgspec.structs.replace(config.model, path="next-model")
        places.write_config(msgspec.structs.replace(config, model=other))
        report(places)  # reads it
        loader.request(Checked(), AskAgain)
    assert report(places).state is RankState.EMPTY


def test_an_engine_that_publishes_checks_what_was_given_back_first(
    places: Places, loss: Loss
) -> None:
    loss.lose()
    loss.offer()
    module = torch.nn.Linear(2, 2)
    with pytest.raises(WcacheError, match="generation 1 was given back by an engine"):
        loss.served(lambda: wcache.publish(module))
    serving = report(places).serving
    assert serving is not None
    assert serving.manifest_digest == loss.digest


def test_a_checker_that_dies_leaves_an_empty_rank_that_asks_again(
    places: Places, loss: Loss
) -> None:
    loss.lose()
    before = settled_files(loss.daemon.pid)
    with loss.engine() as engine:
        assert isinstance(loss.renew(engine), OfferWanted)
        loss.offer()
        with Control.connect(places.rank(), "loader") as loader:
            order = loader.request(AskLoad(), CheckOrder)
            close_all(loader.take_fds(1 + len(order.slabs)))
            assert report(places).state is RankState.LOADING
            with pytest.raises(NotReadyError):
                loss.renew(engine)
        wait_for(lambda: report(places).state is RankState.EMPTY, "empty again")
        assert isinstance(loss.renew(engine), OfferWanted)
    wait_for(lambda: open_files(loss.daemon.pid) == before, "what was offered is closed")
    loss.offer()
    assert "given back by an engine" in loss.check()
    assert report(places).state is RankState.READY


def test_an_offer_during_a_load_is_refused_and_the_load_goes_on(places: Places, loss: Loss) -> None:
    loss.lose()
    with Control.connect(places.rank(), "loader") as loader, loss.engine() as engine:
        loader.request(AskLoad(source="engine"), LoadOrder)
        with pytest.raises(NotReadyError, match="is getting weights"):
            loss.renew(engine)
        with pytest.raises(TryAgainError, match="a load is under way"):
            loss.offer()
    wait_for(lambda: report(places).state is RankState.EMPTY, "the publisher is gone")
    with loss.engine() as engine:
        assert isinstance(loss.renew(engine), OfferWanted)


def test_a_client_that_has_kept_nothing_is_told_that_it_is_gone(places: Places, loss: Loss) -> None:
    loss.lose()
    with loss.engine() as engine, pytest.raises(WcacheError, match="does not hold"):
        engine.request(Renew(manifest_digest=loss.digest), Leased)


def test_a_right_check_is_stored_before_it_is_served(
    places: Places, store: Store, loss: Loss
) -> None:
    loss.lose()
    loss.offer()
    store.said.clear()
    with Control.connect(places.rank(), "loader") as loader:
        order = loader.request(AskLoad(), CheckOrder)
        close_all(loader.take_fds(1 + len(order.slabs)))
        loss.served(lambda: loader.request(Checked(), Published))
    order_of = [line for line in store.said if line.startswith(("FDNAME", "BARRIER", "READY"))]
    assert order_of == [
        "FDNAME=g1.slab.0", "FDNAME=g1.slab.1", "FDNAME=g1.manifest", "BARRIER=1", "READY=1",
    ]  # fmt: skip
