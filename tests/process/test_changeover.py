"""Other weights under a running daemon: staged, switched to, gone back from, over crashes."""

import os
import signal
from collections.abc import Callable

import msgspec
import pytest

from tests.changeover import (
    asked,
    load,
    lose,
    meanwhile,
    model,
    release,
    roles,
    stage,
    switch,
)
from tests.daemons import Daemon, Start, attach, connects, report
from tests.places import Places
from tests.processes import Store, daemon_log, end, wait_for
from tests.publishing import content, head, manifest, offered, slab
from wcache.config import Config, LayoutSection
from wcache.daemon.roles import Record, Roles
from wcache.errors import TryAgainError, WcacheError
from wcache.fingerprint import held_from
from wcache.memory.memfd import create_sealed
from wcache.protocol.control import Control, RefusedError
from wcache.protocol.messages import (
    AskLoad,
    Leased,
    LoadFailed,
    LoadOrder,
    NothingToLoad,
    Publish,
    Published,
    Renew,
    StoreAgain,
    Stored,
)
from wcache.protocol.wire import close_all
from wcache.state import RankState

pytestmark = pytest.mark.process

A, B, C = model("a"), model("b"), model("c")


@pytest.fixture
def daemon(places: Places, store: Store, start: Start) -> Daemon:
    """Serves generation 1, which has the weights of A."""
    places.write_config(A)
    running = start(ready=False)
    store.serve(lambda: connects(places))
    load(places, store, A, b"a")
    return running


def served(places: Places) -> tuple[int, bytes]:
    """The generation that a new client gets, and what is in it."""
    with Control.connect(places.rank(), "client") as control:
        attached, fds = attach(control)
        found = head(fds[1])
        close_all(fds)
    return attached.generation, found


def held(places: Places) -> dict[int, str]:
    return roles(report(places).generations)


def settled(places: Places, store: Store, state: RankState) -> None:
    meanwhile(store, lambda: wait_for(lambda: report(places).state is state, f"it is {state}"))


def staged_b(places: Places, store: Store) -> None:
    assert stage(places, store, B).step == "load"
    assert load(places, store, B, b"b") == 2


def test_what_is_staged_is_not_served_before_the_switch(
    places: Places, store: Store, daemon: Daemon
) -> None:
    staged_b(places, store)
    assert held(places) == {1: "serving", 2: "staged"}
    assert served(places) == (1, content(b"a"))
    assert report(places).state is RankState.READY
    switch(places, store, 2)
    assert served(places) == (2, content(b"b"))


def test_a_client_keeps_its_values_and_the_memory_returns_with_its_end(
    places: Places, store: Store, daemon: Daemon
) -> None:
    staged_b(places, store)
    with Control.connect(places.rank(), "client") as old:
        _, fds = attach(old)
        switch(places, store, 2)
        assert served(places) == (2, content(b"b"))
        assert held(places) == {1: "draining", 2: "serving"}
        assert "generation 1 drains: 1 lease" in report(places).status
        assert head(fds[1]) == content(b"a")
        close_all(fds)
    places.write_config(B)
    store.serve(lambda: store.fds.keys() == {"g2.slab.0", "g2.manifest", "config"})
    assert held(places) == {2: "serving"}
    freed = report(places).freed
    assert freed is not None
    assert freed.number == 1


def test_without_leases_the_old_weights_are_freed_at_the_switch(
    places: Places, store: Store, daemon: Daemon
) -> None:
    staged_b(places, store)
    switch(places, store, 2)
    assert held(places) == {2: "serving"}


def test_a_failed_load_leaves_what_is_served_and_no_candidate(
    places: Places, store: Store, daemon: Daemon
) -> None:
    stage(places, store, B)

    def fail() -> None:
        with Control.connect(places.rank(), "loader") as loader:
            loader.request(AskLoad(), LoadOrder)
            loader.tell(LoadFailed(message="disk is on fire"))

    meanwhile(store, fail)
    settled(places, store, RankState.READY)
    assert served(places) == (1, content(b"a"))
    found = report(places)
    assert found.staging is None
    assert found.problems == ("the last load failed: disk is on fire",)
    with Control.connect(places.rank(), "loader") as loader:
        loader.request(AskLoad(), NothingToLoad)


def test_a_daemon_loads_nothing_beside_what_it_serves_by_itself(
    places: Places, store: Store, daemon: Daemon
) -> None:
    """After a change of the file a crash of one rank must not have it serve another model."""
    places.write_config(B)
    with Control.connect(places.rank(), "loader") as loader:
        answer = loader.request(AskLoad(), NothingToLoad)
    assert "wcache warm" in answer.message
    assert report(places).differences


def test_weights_that_are_held_are_switched_to_without_a_load(
    places: Places, store: Store, daemon: Daemon
) -> None:
    staged_b(places, store)
    switch(places, store, 2, keep_old=True)
    assert held(places) == {1: "held", 2: "serving"}
    answer = stage(places, store, A, load=False)
    assert (answer.step, answer.generation) == ("staged", 1)
    switch(places, store, 1)
    assert served(places) == (1, content(b"a"))
    assert held(places) == {1: "serving"}


def test_what_is_not_held_any_more_is_not_gone_back_to(
    places: Places, store: Store, daemon: Daemon
) -> None:
    staged_b(places, store)
    switch(places, store, 2)
    with pytest.raises(RefusedError, match="holds no generation with these weights") as caught:
        stage(places, store, A, load=False)
    assert caught.value.refusal.reason == "gone"
    assert report(places).staging is None


def test_each_generation_has_the_configuration_that_it_goes_with(
    places: Places, store: Store, daemon: Daemon
) -> None:
    staged_b(places, store)
    places.write_config(B)
    switch(places, store, 2, keep_old=True)
    assert {one.number: one.config for one in report(places).generations} == {1: A, 2: B}


def test_the_configuration_of_what_is_served_outlives_the_file_and_the_daemon(
    places: Places, store: Store, daemon: Daemon, start: Start
) -> None:
    places.write_config(B)
    store.serve(lambda: any(name.startswith("roles.") for name in store.fds))
    end(daemon)
    start()
    assert [one.config for one in report(places).generations] == [A]


Phase = Callable[[Places, Store], None]


def phase_ordered(places: Places, store: Store) -> None:
    stage(places, store, B)


def phase_staged(places: Places, store: Store) -> None:
    staged_b(places, store)


def phase_switched(places: Places, store: Store) -> None:
    staged_b(places, store)
    switch(places, store, 2, keep_old=True)


def phase_back(places: Places, store: Store) -> None:
    """The lower number serves, and the higher one is held: numbers tell nothing here."""
    phase_switched(places, store)
    stage(places, store, A, load=False)
    switch(places, store, 1, keep_old=True)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(
    ("phase", "serving", "parts"),
    [
        (phase_ordered, (1, b"a"), {1: "serving"}),
        (phase_staged, (1, b"a"), {1: "serving", 2: "staged"}),
        (phase_switched, (2, b"b"), {1: "held", 2: "serving"}),
        (phase_back, (1, b"a"), {1: "serving", 2: "held"}),
    ],
)
def test_a_restart_changes_no_part_in_any_phase(
    places: Places, store: Store, daemon: Daemon, start: Start,
    how: signal.Signals, phase: Phase, serving: tuple[int, bytes], parts: dict[int, str],
) -> None:  # fmt: skip
    phase(places, store)
    before = report(places)
    end(daemon, how)
    # By name alone: the order in which a supervisor hands them over is no order.
    store.fds = dict(sorted(store.fds.items(), reverse=True))
    start()
    assert served(places) == (serving[0], content(serving[1]))
    after = report(places)
    assert roles(after.generations) == parts == roles(before.generations)
    assert after.staging == before.staging
    assert [one.config for one in after.generations] == [one.config for one in before.generations]
    assert after.expected_fds == before.expected_fds == len(store.fds)


def test_a_load_that_a_crash_has_ended_begins_again(
    places: Places, store: Store, daemon: Daemon, start: Start
) -> None:
    stage(places, store, B)
    with Control.connect(places.rank(), "loader") as loader:
        loader.request(AskLoad(), LoadOrder)
        end(daemon)
    start()
    assert load(places, store, B, b"b") == 2
    assert held(places) == {1: "serving", 2: "staged"}


def test_a_crash_between_the_records_of_two_choices_keeps_the_later_one(
    places: Places, store: Store, daemon: Daemon, start: Start
) -> None:
    phase_back(places, store)
    name = next(name for name in store.fds if name.startswith("roles."))
    earlier = Record.of(Roles(serving=2), 1)
    store.fds["roles.1"] = earlier.fd
    assert name != "roles.1"
    end(daemon)
    start()
    assert served(places) == (1, content(b"a"))
    store.serve(lambda: "roles.1" not in store.fds)


def test_a_record_of_another_version_still_tells_what_is_served(
    places: Places, store: Store, daemon: Daemon, start: Start
) -> None:
    phase_back(places, store)
    end(daemon)
    name = next(name for name in store.fds if name.startswith("roles."))
    os.close(store.fds[name])
    later = {"serving": 1, "held": 2, "configs": {"1": {"version": 9}}, "more": True}
    store.fds[name] = create_sealed("roles", msgspec.json.encode(later))
    start()
    assert served(places) == (1, content(b"a"))
    assert held(places) == {1: "serving", 2: "held"}


def test_a_record_that_can_not_be_read_loses_no_weights(
    places: Places, store: Store, daemon: Daemon, start: Start
) -> None:
    phase_switched(places, store)
    end(daemon)
    name = next(name for name in store.fds if name.startswith("roles."))
    os.close(store.fds[name])
    store.fds[name] = create_sealed("roles", b"\xff{")
    start()
    assert served(places) == (2, content(b"b"))
    assert 1 in held(places)


def test_a_generation_that_serves_and_was_lost_leaves_the_other_one(
    places: Places, store: Store, daemon: Daemon, start: Start
) -> None:
    phase_back(places, store)
    end(daemon)
    os.close(store.fds.pop("g1.slab.0"))
    start()
    assert served(places) == (2, content(b"b"))


def test_the_choice_is_handed_to_a_supervisor_that_comes_back(
    places: Places, store: Store, daemon: Daemon, start: Start
) -> None:
    phase_back(places, store)
    before = set(store.fds)
    lose(store)
    asked(places, store, StoreAgain(), Stored)
    assert set(store.fds) == before
    end(daemon)
    start()
    assert served(places) == (1, content(b"a"))


def test_a_client_of_the_draining_generation_renews_after_a_restart(
    places: Places, store: Store, daemon: Daemon, start: Start
) -> None:
    digest = report(places).generations[0].manifest_digest
    with Control.connect(places.rank(), "client") as old:
        _, fds = attach(old)
        close_all(fds)
        staged_b(places, store)
        switch(places, store, 2)
        end(daemon)
    start()
    with Control.connect(places.rank(), "client") as again:
        assert again.request(Renew(manifest_digest=digest), Leased).generation == 1
        assert held(places) == {1: "draining", 2: "serving"}


def test_a_new_load_gives_up_what_is_held_to_make_room(
    places: Places, store: Store, daemon: Daemon
) -> None:
    phase_switched(places, store)
    assert stage(places, store, C).step == "load"
    assert held(places) == {2: "serving"}


def test_release_frees_by_role_and_nothing_else(
    places: Places, store: Store, daemon: Daemon
) -> None:
    phase_switched(places, store)
    assert release(places, store, "staged").generations == ()
    assert held(places) == {1: "held", 2: "serving"}
    assert release(places, store, "held").generations == (1,)
    assert held(places) == {2: "serving"}
    stage(places, store, C)
    load(places, store, C, b"c")
    assert release(places, store, "staged").generations == (3,)
    assert held(places) == {2: "serving"}
    assert report(places).staging is None


def test_an_order_that_was_given_up_is_not_fulfilled(
    places: Places, store: Store, daemon: Daemon
) -> None:
    stage(places, store, B)
    release(places, store, "staged")
    with Control.connect(places.rank(), "loader") as loader:
        loader.request(AskLoad(), NothingToLoad)


@pytest.mark.parametrize("configured", [A, B], ids=["the file is old", "the file is new"])
def test_what_is_given_up_during_its_load_is_refused_in_these_words(
    places: Places, store: Store, daemon: Daemon, configured: Config
) -> None:
    """Also when the configuration asks for it, as it does during an ``up``."""
    places.write_config(configured)
    stage(places, store, B)
    with Control.connect(places.rank(), "loader") as loader:
        loader.request(AskLoad(), LoadOrder)
        release(places, store, "staged")

        described = manifest(fingerprint=held_from(B, 0))
        with (
            offered(described, [content(b"b")]) as fds,
            pytest.raises(RefusedError, match="an operator gave them up while they were loaded"),
        ):
            loader.request(Publish(slabs=described.slabs), Published, fds)
    assert held(places) == {1: "serving"}
    assert "an operator gave them up" in report(places).problems[0]


def test_served_weights_are_freed_only_when_nobody_uses_them(
    places: Places, store: Store, daemon: Daemon
) -> None:
    with Control.connect(places.rank(), "client") as engine:
        _, fds = attach(engine)
        close_all(fds)
        with pytest.raises(TryAgainError, match="an engine uses the weights of rank 0"):
            release(places, store, "serving")
    wait_for(lambda: not report(places).leases, "the lease ends")
    assert release(places, store, "serving").generations == (1,)
    found = report(places)
    assert (found.state, found.generations) == (RankState.EMPTY, ())
    assert not places.rank().ready_file.exists()
    store.serve(lambda: store.fds.keys() == {"config"})


def test_a_rank_that_was_emptied_outlives_a_failed_load_and_takes_the_next(
    places: Places, store: Store, daemon: Daemon
) -> None:
    release(places, store, "serving")

    def fail() -> None:
        with Control.connect(places.rank(), "loader") as loader:
            loader.request(AskLoad(), LoadOrder)
            loader.tell(LoadFailed(message="disk is on fire"))

    meanwhile(store, fail)
    settled(places, store, RankState.EMPTY)
    assert "disk is on fire" in report(places).problems[0]
    assert load(places, store, A, b"a") == 2
    assert served(places) == (2, content(b"a"))
    assert places.rank().ready_file.exists()


def test_what_the_supervisor_did_not_hear_of_is_never_mixed_with_what_comes_after(
    places: Places, store: Store, start: Start, daemon: Daemon
) -> None:
    """Its queue was full while a generation was freed: the store has that one still."""
    kept = {name: os.dup(fd) for name, fd in store.fds.items() if name != "config"}
    release(places, store, "serving")
    store.serve(lambda: store.fds.keys() == {"config"})
    load(places, store, A, b"b")
    end(daemon)
    assert not kept.keys() & store.fds.keys()
    store.fds |= kept
    start()
    assert served(places) == (2, content(b"b"))


class SameName(str):
    """A second entry of the same name: stores keep any number of them."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


@pytest.mark.parametrize("name", ["g1.slab.0", "g1.manifest"])
def test_two_contents_under_one_name_are_neither_of_them_served(
    places: Places, store: Store, start: Start, daemon: Daemon, name: str
) -> None:
    end(daemon)
    store.fds[SameName(name)] = slab(b"of another generation")
    start(ready=False)
    store.serve(lambda: connects(places) and not {"g1.slab.0", "g1.manifest"} & store.fds.keys())
    assert report(places).state is RankState.EMPTY
    assert "two contents" in daemon_log(places).read_text()


def test_one_content_that_is_stored_twice_is_served(
    places: Places, store: Store, start: Start, daemon: Daemon
) -> None:
    end(daemon)
    store.fds[SameName("g1.slab.0")] = os.dup(store.fds["g1.slab.0"])
    start()
    assert served(places) == (1, content(b"a"))


def test_right_after_a_restart_nothing_that_is_served_is_freed(
    places: Places, store: Store, daemon: Daemon, start: Start
) -> None:
    end(daemon)
    start()
    with pytest.raises(TryAgainError, match="engines may still renew their leases"):
        release(places, store, "serving")


def test_a_switch_can_be_asked_for_twice_and_for_nothing_else_than_what_is_staged(
    places: Places, store: Store, daemon: Daemon
) -> None:
    staged_b(places, store)
    with pytest.raises(WcacheError, match="generation 3 of rank 0 does not wait to be served"):
        switch(places, store, 3)
    switch(places, store, 2)
    assert switch(places, store, 2).generation == 2


def test_another_order_during_a_load_is_refused_and_the_same_one_is_not(
    places: Places, store: Store, daemon: Daemon
) -> None:
    stage(places, store, B)
    with Control.connect(places.rank(), "loader") as loader:
        loader.request(AskLoad(), LoadOrder)
        with pytest.raises(TryAgainError, match="is loading generation 2"):
            stage(places, store, C)
        assert stage(places, store, B).step == "loading"


def test_a_configuration_that_can_not_be_is_not_staged(
    places: Places, store: Store, daemon: Daemon
) -> None:
    for layout in (LayoutSection(tp=0), LayoutSection(node_rank=7)):
        with pytest.raises(WcacheError, match="what is to be staged: layout"):
            stage(places, store, msgspec.structs.replace(B, layout=layout))
    assert report(places).staging is None


def test_held_weights_are_not_freed_when_the_time_for_renewals_is_over(
    places: Places, store: Store, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: half a minute is too long to be waited for."""
    from wcache.daemon.configuration import Configuration
    from wcache.daemon.holdings import Holdings
    from wcache.notify import Notifier

    phase_switched(places, store)
    end(daemon)
    monkeypatch.setattr("wcache.daemon.holdings.DRAIN_GRACE_S", 0.0)
    handed_over = {name: os.dup(fd) for name, fd in store.fds.items()}
    configuration = Configuration(places.instance().config_file, handed_over.pop("config"))
    holdings = Holdings(0, Notifier(None, None), configuration)
    holdings.adopt(handed_over)
    holdings.free_drained(())
    assert {one.number: holdings.role(one) for one in holdings} == {1: "held", 2: "serving"}
    for one in holdings:
        one.close()
