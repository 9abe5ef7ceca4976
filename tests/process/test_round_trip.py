"""Any module that is published to a daemon and bound comes out equal."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import wcache
from tests.modules import Built, found_in, modules, raw
from tests.places import Places, publish_config
from wcache.daemon.configuration import Configuration
from wcache.daemon.rank import Rank
from wcache.daemon.server import Server
from wcache.notify import Notifier
from wcache.verify import Verifier

pytestmark = pytest.mark.process


@contextmanager
def empty_rank(places: Places) -> Iterator[None]:
    """A daemon of its own for each module, with its real socket; its loop is a thread here."""
    config_file = places.instance().config_file
    paths = places.rank()
    # No daemon before this one: it would wait for this process to give its weights back.
    paths.served_file.unlink(missing_ok=True)
    rank = Rank(paths, Notifier(None, None), Configuration(config_file, None))
    server = Server(paths, rank)
    rank.begin()
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            server.step(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        server.close()
        for generation in rank._holdings:
            generation.close()


def apart(first: torch.Tensor, second: torch.Tensor) -> int | None:
    """Bytes between two views of one storage; None where they share none."""
    if not (first.numel() and second.numel()):
        return None
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return None
    return second.data_ptr() - first.data_ptr()


@pytest.fixture
def waiting(places: Places) -> Places:
    places.write_config(publish_config())
    return places


# The folders are the same for every module, and nothing in them is kept from one to the next.
@pytest.mark.timeout(400)  # a daemon that stores, publishes and is emptied, for every module
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(built=modules())
def test_any_module_comes_out_equal(waiting: Places, built: Built) -> None:
    expected = {slot.name: slot for slot in built.slots}
    with empty_rank(waiting):
        wcache.publish(built.module)
        with wcache.attach() as attachment:
            attachment.bind(built.twin)
            described = {tensor.name: tensor for tensor in attachment.manifest.tensors}
            bound = {slot.name: slot for slot in found_in(built.twin)}
            assert described.keys() == bound.keys() == expected.keys()
            for name, slot in expected.items():
                tensor, there = slot.tensor.detach(), bound[name]
                assert (there.kind, there.persistent) == (slot.kind, slot.persistent), name
                assert there.tensor.dtype == tensor.dtype, name
                assert there.tensor.shape == tensor.shape, name
                assert there.tensor.stride() == tensor.stride(), name
                assert described[name].storage_offset == tensor.storage_offset(), name
                assert raw(there.tensor) == raw(tensor), name
                if slot.kind == "parameter":
                    assert attachment.holds(there.tensor), name
            for first, second in combinations(expected.values(), 2):
                here = bound[first.name].tensor, bound[second.name].tensor
                tied = first.tensor is second.tensor
                assert (here[0] is here[1]) == tied, (first.name, second.name)
                # Buffers are private copies: they share with each other, and not with parameters.
                if (first.kind == "parameter") == (second.kind == "parameter"):
                    before = apart(first.tensor, second.tensor)
                    assert before is None or apart(*here) == before, (first.name, second.name)
        results = list(
            Verifier(None).verify(waiting.rank(), depth="digest", progress=lambda *_: None)
        )
        assert [result.result for result in results] == ["ok"] * 3
