"""What a daemon has its supervisor keep is handed over again when nobody listened."""

import os

import pytest

from tests.life.keeper import Clock, Keeper
from tests.places import Places, publish_config
from tests.processes import Store
from wcache import notify
from wcache.daemon import safekeeping
from wcache.daemon.configuration import STORED_NAME, Configuration
from wcache.daemon.roles import Record, Roles
from wcache.daemon.safekeeping import Safekeeping
from wcache.memory.memfd import create_sealed, read_sealed
from wcache.notify import Notifier

pytestmark = pytest.mark.unit


def test_a_configuration_that_nobody_heard_of_is_stored_later_and_once(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = places.root / "notify"
    configuration = Configuration(places.write_config(publish_config()), None)
    notifier = Notifier(str(path), None)
    keeping = Safekeeping(notifier)
    monkeypatch.setattr(safekeeping, "AGAIN_S", 0.0)
    keeping.keep_config(configuration)
    store = Store(path)
    try:
        for _ in range(3):
            keeping.keep_lost_config(configuration)
        notifier.say("STATUS=end")
        store.serve(lambda: "STATUS=end" in store.said)
        assert STORED_NAME in store.fds
        assert store.said.count("FDSTORE=1") == 1
    finally:
        store.close()


def test_what_nobody_heard_the_end_of_is_given_up_later(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that hangs: its queue is full, and its store keeps what was freed."""
    monkeypatch.setattr(notify, "SEND_TIMEOUT_S", 0.05)
    monkeypatch.setattr(safekeeping, "AGAIN_S", 0.0)
    path = places.root / "notify"
    store = Store(path)
    try:
        names = ["g1.slab.0", "g1.slab.1", "g1.manifest"]
        store.fds |= {name: os.memfd_create(name) for name in names}
        notifier = Notifier(str(path), None)
        while notifier.mention("STATUS=full"):
            pass
        keeping = Safekeeping(notifier)
        keeping.discard(names)
        assert "3 descriptors are given up: what was freed may still" in keeping.problem
        assert not keeping.discard_again()
        store.serve(lambda: keeping.discard_again())
        store.serve(lambda: not store.fds)
        assert not keeping.has_leftovers
        assert keeping.problem == ""
    finally:
        store.close()


def test_a_new_supervisor_that_misses_something_gets_it_later(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has asked for everything, and its queue is full before it has taken all of it in."""
    # It is the default of a parameter.
    monkeypatch.setattr(Notifier._send, "__defaults__", (0.05,))
    monkeypatch.setattr(safekeeping, "AGAIN_S", 0.0)
    configuration = Configuration(places.write_config(publish_config()), None)
    path = places.root / "notify"
    first, notifier = Store(path), Notifier(str(path), None)
    keeping = Safekeeping(notifier)
    keeping.keep_config(configuration)
    # Not at stake, so that no confirmation is waited for, which nobody gives here.
    keeping.keep_roles(Roles(serving=1), needed=True, at_stake=False)
    first.close()
    second = Store(path)
    try:
        filled = 0
        while notifier.mention("STATUS=full"):
            filled += 1
        assert keeping.keep_records_again() == 0
        assert keeping.keep_config_again(configuration) == 0
        assert "did not confirm which generation is served" in keeping.problem
        second.serve(lambda: second.said.count("STATUS=full") == filled)
        keeping.keep_roles_again()
        keeping.keep_lost_config(configuration)
        second.serve(lambda: {STORED_NAME, "roles.1"} <= set(second.fds))
        assert keeping.problem == ""
    finally:
        second.close()


def test_what_only_another_wcache_can_read_is_handed_over_later_as_it_came(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safekeeping, "AGAIN_S", 0.0)
    stored = create_sealed("config", b'{"model": 5}')
    record = Record(3, create_sealed("roles", b"[]"))
    configuration = Configuration(places.instance().config_file, stored)
    assert configuration.current is None
    keeper = Keeper(Clock())
    keeping = Safekeeping(keeper)
    keeping.adopt_records([record], None)
    try:
        keeper.listens = False
        assert keeping.keep_records_again() == keeping.keep_config_again(configuration) == 0
        keeper.listens = True
        keeping.keep_roles_again()
        keeping.keep_lost_config(configuration)
        contents = {name: read_sealed(fd, 100) for name, fd in keeper.stored}
        assert contents == {"roles.3": b"[]", STORED_NAME: b'{"model": 5}'}
    finally:
        keeper.lose()
        record.close()
        os.close(stored)
