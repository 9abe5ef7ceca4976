"""Weights that must not be taken back: other bytes, other models, and peers that misbehave."""

import os
import resource
from collections.abc import Iterator

import msgspec
import pytest

from tests.daemons import Start, attach, report
from tests.hostile.test_peers import in_child
from tests.places import Places, publish_config
from tests.processes import Store, open_files, settled_files, wait_for
from tests.publishing import FINGERPRINT, SLAB_BYTES, content, head, raw_channel, slab
from tests.reclaiming import WEIGHTS, Loss, described, descriptors, flipped
from wcache.config import AccessSection
from wcache.errors import TryAgainError, WcacheError
from wcache.manifest import SlabInfo
from wcache.protocol.control import Control, RefusedError
from wcache.protocol.messages import (
    AskLoad,
    Checked,
    CheckOrder,
    Descriptors,
    Hello,
    Offer,
    Offered,
    OfferWanted,
    Published,
    encode_frame,
)
from wcache.protocol.wire import close_all, send
from wcache.state import RankState

pytestmark = pytest.mark.hostile

replace = msgspec.structs.replace


@pytest.fixture
def loss(places: Places, store: Store, start: Start) -> Iterator[Loss]:
    """A daemon that has lost its weights; afterwards it takes the right ones all the same."""
    places.write_config(publish_config())
    made = Loss(places, store, start)
    made.lose()
    before = settled_files(made.daemon.pid)
    yield made
    if report(places).state is RankState.EMPTY:
        wait_for(lambda: open_files(made.daemon.pid) == before, "what was refused is closed")
        assert isinstance(made.offer(), Offered)
        assert "given back by an engine" in made.check()
        serving = report(places).serving
        assert serving is not None
        assert serving.manifest_digest == made.digest
    made.close()


def refused(loss: Loss, said: str) -> None:
    """The last offer was refused for ``said``, and this process is named as who made it."""
    (problem,) = report(loss.places).problems
    assert problem.startswith(f"pid {os.getpid()} (")
    assert said in problem
    assert problem in loss.log()
    assert report(loss.places).state is RankState.EMPTY


# --- what an offer may not be ---------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1])
def test_one_bit_that_differs_is_found_and_its_engine_named(loss: Loss, index: int) -> None:
    weights = [flipped(data) if place == index else data for place, data in enumerate(WEIGHTS)]
    slabs = [slab(data) for data in weights]
    assert isinstance(loss.offer([loss.fds[0], *slabs]), Offered)
    close_all(slabs)
    assert loss.load() == 0
    assert "the first engine publishes" in loss.log("loader")
    refused(loss, f"1 of 2 storages, 4 KiB, are not the bytes that were published: t{index}")
    with loss.engine() as engine, pytest.raises(RefusedError, match="does not hold"):
        loss.renew(engine)  # this process is not asked again


def test_slabs_in_another_order_are_found(loss: Loss) -> None:
    manifest, first, second = loss.fds
    assert isinstance(loss.offer([manifest, second, first]), Offered)
    assert "the first engine publishes" in loss.check()
    refused(loss, "2 of 2 storages")


def test_a_manifest_made_to_fit_changed_bytes_is_not_the_recorded_one(loss: Loss) -> None:
    weights = [flipped(data) for data in WEIGHTS]
    forged = replace(described(weights), id=loss.manifest.id)
    with descriptors(forged, weights) as fds, pytest.raises(WcacheError, match="its manifest is"):
        loss.offer(fds, forged)
    refused(loss, "served last was")


def test_the_manifest_of_another_model_is_refused_field_by_field(loss: Loss) -> None:
    other = described(fingerprint=replace(FINGERPRINT, model="other-model"))
    with descriptors(other) as fds, pytest.raises(WcacheError, match="not the wanted ones"):
        loss.offer(fds, other)
    refused(loss, "model: cached other-model, wanted test-model")


def test_fewer_descriptors_than_slabs_are_refused(loss: Loss) -> None:
    with pytest.raises(WcacheError, match="2 descriptors for a manifest and 2 slabs"):
        loss.offer(loss.fds[:2])
    refused(loss, "2 descriptors")


def test_more_descriptors_than_slabs_are_refused(loss: Loss) -> None:
    with pytest.raises(WcacheError, match="4 descriptors for a manifest and 2 slabs"):
        loss.offer([*loss.fds, loss.fds[1]])
    refused(loss, "4 descriptors")


def test_no_descriptors_are_refused(loss: Loss) -> None:
    with loss.engine() as engine, pytest.raises(WcacheError, match="0 descriptors"):
        engine.request(Offer(slabs=loss.manifest.slabs), Offered)


def test_other_slabs_than_the_manifests_are_refused(loss: Loss) -> None:
    few = replace(loss.manifest, slabs=loss.manifest.slabs[:1])
    with pytest.raises(WcacheError, match="manifest names other slabs"):
        loss.offer(loss.fds[:2], few)


def test_memory_that_could_still_change_is_refused(loss: Loss) -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.truncate(fd, SLAB_BYTES)
    os.pwrite(fd, WEIGHTS[1], 0)
    with pytest.raises(WcacheError, match="slab 1: memfd is not sealed"):
        loss.offer([*loss.fds[:2], fd])
    os.close(fd)
    refused(loss, "not sealed")


def test_the_hosts_memory_can_not_pass_for_a_gpus(loss: Loss) -> None:
    info = SlabInfo(kind="cuda", nbytes=SLAB_BYTES, device_uuid="GPU-x")
    false = replace(loss.manifest, slabs=(info, info))
    with descriptors(false) as fds, pytest.raises(WcacheError, match="slab 0: "):
        loss.offer(fds, false)


# --- when an offer may not be ---------------------------------------------------------------


def test_a_daemon_that_serves_takes_no_offer(places: Places, loss: Loss) -> None:
    loss.offer()
    assert "given back by an engine" in loss.check()
    before = settled_files(loss.daemon.pid)
    with pytest.raises(TryAgainError, match="generation 1 is held"):
        loss.offer()
    wait_for(lambda: open_files(loss.daemon.pid) == before, "what was refused is closed")
    with Control.connect(places.rank(), "client") as control:
        _, fds = attach(control)
        assert head(fds[1]) == content(b"a")
        close_all(fds)


def test_a_second_offer_is_refused_and_the_first_stands(places: Places, loss: Loss) -> None:
    loss.offer()
    with descriptors(loss.manifest, [flipped(data) for data in WEIGHTS]) as fds:
        for _ in range(5):
            with pytest.raises(TryAgainError, match=f"pid {os.getpid()} .* was faster"):
                loss.offer(fds)
    assert "given back by an engine" in loss.check()
    assert report(places).state is RankState.READY


def test_a_peer_that_dies_within_its_offer_leaves_nothing(places: Places, loss: Loss) -> None:
    for said in (1, 2):
        connection, channel = raw_channel(places.rank())
        with connection:
            channel.send(Hello(role="client", command="dies"))
            send(connection, encode_frame(Descriptors(count=3)), loss.fds)
            if said == 2:
                connection.sendall(encode_frame(Offer(slabs=loss.manifest.slabs))[:-5])
    assert report(places).problems == ()


def test_what_nobody_asked_to_check_is_not_believed(places: Places, loss: Loss) -> None:
    """Another loader than the one with the order says that all is well."""
    loss.offer()
    with (
        Control.connect(places.rank(), "loader") as checker,
        Control.connect(places.rank(), "loader") as other,
    ):
        order = checker.request(AskLoad(), CheckOrder)
        close_all(checker.take_fds(1 + len(order.slabs)))
        with pytest.raises(WcacheError, match="was not asked to load"):
            other.request(Checked(), Published)
    wait_for(lambda: report(places).state is RankState.EMPTY, "the checker is gone")


def test_endless_words_of_a_checker_are_cut(places: Places, loss: Loss) -> None:
    loss.offer()
    with Control.connect(places.rank(), "loader") as checker:
        order = checker.request(AskLoad(), CheckOrder)
        close_all(checker.take_fds(1 + len(order.slabs)))
        checker.tell(Checked(problem="x" * 900_000))
        wait_for(lambda: report(places).state is RankState.EMPTY, "it is given up")
    assert len(report(places).problems[0]) < 2000


def test_many_refused_engines_cost_a_few_words(places: Places, loss: Loss) -> None:
    """From as many processes, of which none lives any more."""
    for _ in range(12):
        assert "0 descriptors" in in_child(lambda: _offer_nothing(loss))
    assert report(places).problems == ()


def _offer_nothing(loss: Loss) -> None:
    with loss.engine() as engine:
        engine.request(Offer(slabs=loss.manifest.slabs), Offered)


# --- who may not offer ----------------------------------------------------------------------


def test_who_may_only_attach_can_give_nothing_back(places: Places, loss: Loss) -> None:
    """The digest guards against accidents: who chooses bytes that others read may publish too."""
    places.root.chmod(0o755)
    places.write_config(publish_config(access=AccessSection(uids=(65533,), publishers=(65532,))))
    wait_for(lambda: places.rank().socket.stat().st_mode & 0o777 == 0o666, "the list is heeded")

    def renew() -> None:
        with loss.engine() as engine:
            assert isinstance(loss.renew(engine), OfferWanted)

    for work in (renew, loss.offer):
        assert "uid 65533 may not give it back" in in_child(work, uid=65533)
    assert in_child(renew, uid=65532) == ""
    assert report(places).problems == ()


def test_a_record_of_somebody_else_is_not_believed(places: Places, loss: Loss) -> None:
    record = places.rank().served_file
    os.chown(record, 65534, 65534)
    loss.lose()
    with loss.engine() as engine, pytest.raises(RefusedError, match="does not hold"):
        loss.renew(engine)
    with pytest.raises(WcacheError, match="it is not known what was served last"):
        loss.offer()
    assert "is not a file of root's or of this user's" in loss.log()
    os.chown(record, os.geteuid(), os.getegid())
    loss.lose()


def test_offers_again_and_again_leak_nothing(places: Places, loss: Loss) -> None:
    """With so few files that a descriptor a time would end the daemon."""
    _, hard = resource.prlimit(loss.daemon.pid, resource.RLIMIT_NOFILE)
    few = settled_files(loss.daemon.pid) + 20
    resource.prlimit(loss.daemon.pid, resource.RLIMIT_NOFILE, (few, hard))
    for _ in range(60):
        with pytest.raises(WcacheError, match="4 descriptors"):
            loss.offer([*loss.fds, loss.fds[1]])
