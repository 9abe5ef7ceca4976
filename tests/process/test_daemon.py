"""A real daemon process: adoption, publishing, leases, restart, notification."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from tests.daemons import Start, attach, connects, published, report
from tests.places import Places, publish_config
from tests.processes import PATIENCE_S, Store, daemon_log, end, start_daemon, wait_for
from tests.publishing import FINGERPRINT, content, head, manifest, offered, publish
from wcache import manifest as manifests
from wcache.config import Config, LayoutSection, ModelSection
from wcache.daemon.refusals import BURST
from wcache.errors import MismatchError, NoSuchRankError, NotReadyError, TryAgainError, WcacheError
from wcache.memory.memfd import create_sealed
from wcache.protocol.control import Control, receive_reply
from wcache.protocol.messages import (
    AskLoad,
    Attach,
    Attached,
    Leased,
    LoadFailed,
    LoadOrder,
    NothingToLoad,
    Progress,
    Publish,
    Published,
    Renew,
    StoreAgain,
    Stored,
)
from wcache.protocol.wire import close_all
from wcache.ranks import ask, ask_when_back
from wcache.state import RankState

pytestmark = pytest.mark.process


def with_model(name: str) -> Config:
    config = publish_config()
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=name))


def test_empty_daemon_is_up_and_says_what_it_waits_for(
    places: Places, store: Store, start: Start
) -> None:
    places.write_config(publish_config())
    start()
    assert report(places).state is RankState.EMPTY
    assert "STATUS=empty, waiting for the first engine to publish" in store.said
    assert not places.rank().ready_file.exists()
    with Control.connect(places.rank(), "client") as control, pytest.raises(NotReadyError):
        control.request(Attach(), Attached)


def test_published_weights_are_stored_before_ready_is_said(
    places: Places, store: Store, start: Start
) -> None:
    places.write_config(publish_config())
    daemon = start()
    store.said.clear()
    published(places, store, [content(b"a"), content(b"b")])
    assert {"g1.slab.0", "g1.slab.1", "g1.manifest", "config"} == store.fds.keys()
    order = [line for line in store.said if line.startswith(("FDNAME", "BARRIER", "READY"))]
    assert order == [
        "FDNAME=g1.slab.0",
        "FDNAME=g1.slab.1",
        "FDNAME=g1.manifest",
        "BARRIER=1",
        "READY=1",
    ]
    ready = json.loads(places.rank().ready_file.read_bytes())
    assert (ready["pid"], ready["generation"], ready["how"]) == (daemon.pid, 1, "published")
    assert msgspec.json.decode(places.rank().fingerprint_file.read_bytes()) == msgspec.to_builtins(
        FINGERPRINT
    )


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_restart_keeps_the_weights(
    places: Places, store: Store, start: Start, how: signal.Signals
) -> None:
    places.write_config(publish_config())
    first = start()
    published(places, store, [content(b"a"), content(b"b")])
    before = report(places)
    end(first, how)
    # Handed over in another order than stored: names count, not places.
    store.fds = dict(sorted(store.fds.items(), reverse=True))
    start()
    after = report(places)
    assert after.state is RankState.READY
    assert after.serving is not None
    assert before.serving is not None
    assert after.serving.how == "adopted"
    assert after.serving.manifest_digest == before.serving.manifest_digest
    assert after.expected_fds == before.expected_fds == len(store.fds)
    with Control.connect(places.rank(), "client") as control:
        _, fds = attach(control)
        assert [head(fd) for fd in fds[1:]] == [content(b"a"), content(b"b")]
        close_all(fds)


def test_daemon_has_read_nothing_of_a_checkpoint_and_has_no_child(
    places: Places, store: Store, start: Start
) -> None:
    places.write_config(publish_config())
    end(start())
    daemon = start()
    published(places, store, [content(b"a")])
    assert Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text() == ""
    maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert "torch" not in maps


def test_lease_is_the_connection(places: Places, store: Store, start: Start) -> None:
    places.write_config(publish_config())
    start()
    published(places, store, [content(b"a")])
    with Control.connect(places.rank(), "client") as control:
        _, fds = attach(control)
        close_all(fds)
        leases = report(places).leases
        assert [(lease.pid, lease.uid, lease.generation) for lease in leases] == [
            (os.getpid(), os.geteuid(), 1)
        ]
        assert "1 lease" in report(places).status
    wait_for(lambda: not report(places).leases, "the lease ends with the connection")


def test_client_renews_after_a_restart_and_is_refused_for_other_weights(
    places: Places, store: Store, start: Start
) -> None:
    places.write_config(publish_config())
    first = start()
    published(places, store, [content(b"a")])
    digest = report(places).generations[0].manifest_digest
    end(first)
    start()
    with Control.connect(places.rank(), "client") as control:
        assert control.request(Renew(manifest_digest=digest), Leased).generation == 1
        assert len(report(places).leases) == 1
    with Control.connect(places.rank(), "client") as control:
        with pytest.raises(WcacheError, match="does not hold that generation any more"):
            control.request(Renew(manifest_digest="sha256:00"), Leased)


def test_mismatch_names_the_fields(places: Places, store: Store, start: Start) -> None:
    places.write_config(publish_config())
    start()
    published(places, store, [content(b"a")])
    wanted = msgspec.structs.replace(FINGERPRINT, model="other", tp_size=2)
    with Control.connect(places.rank(), "client") as control:
        with pytest.raises(
            MismatchError,
            match=r"model: cached test-model, wanted other; tp_size: cached unknown, wanted 2",
        ):
            control.request(Attach(wanted=wanted), Attached)


def test_a_refused_attach_is_a_line_in_the_log(places: Places, store: Store, start: Start) -> None:
    places.write_config(publish_config())
    start()
    with Control.connect(places.rank(), "client") as control, pytest.raises(NotReadyError):
        control.request(Attach(), Attached)
    published(places, store, [content(b"a")])
    switches = {f"s{number}": "1" for number in range(9)}
    wanted = msgspec.structs.replace(
        FINGERPRINT, tp_size=2, architecture="two\nlines\x1b[31m", switches=switches
    )
    with Control.connect(places.rank(), "client") as control, pytest.raises(MismatchError) as error:
        control.request(Attach(wanted=wanted), Attached)
    assert [one.field for one in error.value.differences] == ["architecture", "tp_size", "switches"]
    lines = [line for line in daemon_log(places).read_text().splitlines() if "refused" in line]
    assert len(lines) == 1  # to have to wait is no refusal
    assert f"pid {os.getpid()} (uid {os.geteuid()}, " in lines[0]
    assert " was refused: it wants other weights: architecture: cached " in lines[0]
    assert "wanted two?lines?[31m; tp_size: cached unknown, wanted 2; switches: " in lines[0]


def test_an_engine_that_is_refused_again_and_again_does_not_fill_the_log(
    places: Places, store: Store, start: Start
) -> None:
    places.write_config(publish_config())
    start()
    published(places, store, [content(b"a")])
    wanted = msgspec.structs.replace(FINGERPRINT, tp_size=2)
    with Control.connect(places.rank(), "client") as control:
        for _ in range(200):
            with pytest.raises(MismatchError):
                control.request(Attach(wanted=wanted), Attached)
    lines = daemon_log(places).read_text().count("was refused: it wants other weights: tp_size")
    assert BURST <= lines < 100


def test_second_loader_is_told_who_loads(places: Places, store: Store, start: Start) -> None:
    places.write_config(publish_config())
    start()
    with (
        Control.connect(places.rank(), "loader") as first,
        Control.connect(places.rank(), "loader") as second,
    ):
        first.request(AskLoad(source="engine"), LoadOrder)
        with pytest.raises(TryAgainError, match=f"pid {os.getpid()} is loading generation 1"):
            second.request(AskLoad(source="engine"), LoadOrder)


def test_loader_process_has_nothing_to_do_where_an_engine_publishes(
    places: Places, store: Store, start: Start
) -> None:
    places.write_config(publish_config())
    start()
    with Control.connect(places.rank(), "loader") as loader:
        loader.request(AskLoad(), NothingToLoad)


def test_publisher_that_dies_leaves_room_for_the_next(
    places: Places, store: Store, start: Start
) -> None:
    places.write_config(publish_config())
    start()
    with Control.connect(places.rank(), "loader") as loader:
        loader.request(AskLoad(source="engine"), LoadOrder)
        loader.tell(Progress(phase="read", done_bytes=1 << 20, total_bytes=4 << 20))
        wait_for(lambda: "1.0 MiB of 4.0 MiB (25 %)" in report(places).status, "progress is told")
    wait_for(lambda: report(places).state is RankState.EMPTY, "empty again")
    assert "ended before it had published" in report(places).problems[0]
    published(places, store, [content(b"a")])
    assert report(places).problems == ()


def test_descriptors_are_told_apart_from_the_message_before_them(
    places: Places, store: Store, start: Start
) -> None:
    """The kernel gives a plain frame and the next one's descriptors in one read."""
    places.write_config(publish_config())
    daemon = start()
    described = manifest()
    with Control.connect(places.rank(), "loader") as loader, offered(described, [b"a"]) as fds:
        loader.request(AskLoad(source="engine"), LoadOrder)
        daemon.send_signal(signal.SIGSTOP)
        loader.tell(Progress(phase="publish", done_bytes=1, total_bytes=1))
        loader.channel.send(Publish(slabs=described.slabs), fds)
        daemon.send_signal(signal.SIGCONT)
        store.serve(lambda: "READY=1" in store.said[-2:])
        assert receive_reply(loader.channel, Published).generation == 1


def test_failed_reload_leaves_the_weights_served(
    places: Places, store: Store, start: Start
) -> None:
    places.write_config(publish_config())
    start()
    published(places, store, [content(b"a")])
    changed = publish_config()
    changed = msgspec.structs.replace(
        changed, model=msgspec.structs.replace(changed.model, path="next-model")
    )
    places.write_config(changed)
    with Control.connect(places.rank(), "loader") as loader:
        assert loader.request(AskLoad(source="engine"), LoadOrder).generation == 2
        assert report(places).state is RankState.STAGING
        loader.tell(LoadFailed(message="disk is on fire", hint="put it out"))
        wait_for(lambda: report(places).state is RankState.READY, "ready again")
    assert report(places).problems == ("the last load failed: disk is on fire (put it out)",)
    with Control.connect(places.rank(), "client") as control:
        _, fds = attach(control)
        assert head(fds[1]) == content(b"a")
        close_all(fds)


def test_next_generation_is_served_and_the_old_one_drains(
    places: Places, store: Store, start: Start
) -> None:
    places.write_config(publish_config())
    start()
    published(places, store, [content(b"a")])
    changed = publish_config()
    changed = msgspec.structs.replace(
        changed, model=msgspec.structs.replace(changed.model, path="next-model")
    )
    places.write_config(changed)
    next_manifest = manifest(fingerprint=msgspec.structs.replace(FINGERPRINT, model="next-model"))
    with Control.connect(places.rank(), "client") as old:
        _, old_fds = attach(old)
        with (
            Control.connect(places.rank(), "loader") as loader,
            offered(next_manifest, [content(b"b")]) as fds,
        ):
            loader.request(AskLoad(source="engine"), LoadOrder)
            loader.channel.send(Publish(slabs=next_manifest.slabs), fds)
            store.serve(lambda: store.said.count("READY=1") >= 3)
            assert [held.serving for held in report(places).generations] == [False, True]
        with Control.connect(places.rank(), "client") as new:
            answer, fds = attach(new)
            assert (answer.generation, head(fds[1])) == (2, content(b"b"))
            close_all(fds)
        assert head(old_fds[1]) == content(b"a")
        close_all(old_fds)
    store.serve(lambda: {"g2.slab.0", "g2.manifest", "config"} == store.fds.keys())
    assert [held.number for held in report(places).generations] == [2]


def test_failed_first_load_ends_the_daemon_with_its_reason(
    places: Places, store: Store, start: Start, tmp_path: Path
) -> None:
    config = publish_config()
    model = msgspec.structs.replace(config.model, path=str(tmp_path), loader="safetensors")
    places.write_config(msgspec.structs.replace(config, model=model))
    daemon = start(ready=False)
    store.serve(lambda: places.rank().socket.exists())
    wait_for(lambda: connects(places), "the daemon listens")
    with Control.connect(places.rank(), "loader") as loader:
        loader.request(AskLoad(), LoadOrder)
        store.serve(lambda: any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in store.said))
        loader.tell(LoadFailed(message="shard 2 is truncated"))
        assert daemon.wait(20) == 78
    store.serve(lambda: "STOPPING=1" in store.said)
    assert "STATUS=load failed: shard 2 is truncated" in store.said
    assert "READY=1" not in store.said


def test_broken_configuration_under_a_running_rank_loses_nothing(
    places: Places, store: Store, start: Start
) -> None:
    path = places.write_config(publish_config())
    first = start()
    published(places, store, [content(b"a")])
    path.write_text("[model]\npath = 3\ncolour = 'red'\n")
    end(first)
    start()
    seen = report(places)
    assert seen.state is RankState.READY
    assert [problem.removeprefix(f"{path}: ") for problem in seen.problems] == [
        "model.colour: unknown key",
        "model.path: expected `str`, got `int`",
    ]
    assert "problem: " in seen.status
    with Control.connect(places.rank(), "client") as control:
        _, fds = attach(control)
        assert head(fds[1]) == content(b"a")
        close_all(fds)
    places.write_config(publish_config())
    assert report(places).problems == ()


def test_broken_configuration_without_weights_is_final(places: Places, start: Start) -> None:
    path = places.instance().config_file
    path.parent.mkdir(parents=True)
    path.write_text("[model]\n")
    assert start(ready=False).wait(20) == 78
    assert f"{path}: model.path: missing" in daemon_log(places).read_text()


def test_rank_that_the_configuration_lacks_is_final(places: Places, start: Start) -> None:
    places.write_config(publish_config(layout=LayoutSection(tp=2)))
    daemon = start(ready=False, rank="2")
    assert daemon.wait(20) == 78
    assert "has 2 ranks, and none with number 2" in daemon_log(places, "2").read_text()


def test_generation_with_a_missing_slab_is_dropped_and_said(
    places: Places, store: Store, start: Start
) -> None:
    places.write_config(publish_config())
    first = start()
    published(places, store, [content(b"a"), content(b"b")])
    end(first)
    os.close(store.fds.pop("g1.slab.1"))
    start()
    assert report(places).state is RankState.EMPTY
    assert "slab 1 of 2 was not handed over" in daemon_log(places).read_text()
    store.serve(lambda: store.fds.keys() == {"config"})


def test_half_stored_generation_is_dropped(places: Places, store: Store, start: Start) -> None:
    """A daemon killed while it stored generation 2 comes back with generation 1."""
    places.write_config(publish_config())
    first = start()
    published(places, store, [content(b"a")])
    end(first)
    store.fds["g2.slab.0"] = os.memfd_create("half")
    start()
    assert [held.number for held in report(places).generations] == [1]
    store.serve(lambda: "g2.slab.0" not in store.fds)


def test_what_a_daemon_holds_is_known_again_once_it_is_back(
    places: Places, store: Store, start: Start
) -> None:
    """vLLM would take the memory of weights that it is about to map for free."""
    places.write_config(publish_config())
    first = start()
    published(places, store, [content(b"a")])
    end(first)
    assert ask(places.rank()) is None
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask_when_back, places.rank(), PATIENCE_S)
        start()
        found = asked.result()
    assert found is not None
    assert found.serving is not None
    # Of one that was never there nothing is to come back.
    assert ask_when_back(places.rank(7), float("inf")) is None


def test_second_daemon_of_a_rank_leaves_the_first_alone(
    places: Places, store: Store, start: Start
) -> None:
    places.write_config(publish_config())
    first = start()
    assert start_daemon(places).wait(20) == 75
    assert report(places).pid == first.pid


def test_daemon_without_a_supervisor_says_that_a_restart_loses_the_weights(places: Places) -> None:
    places.write_config(publish_config())
    daemon = start_daemon(places)
    try:
        wait_for(lambda: connects(places), "the daemon listens")
        publish(places.rank(), [content(b"a")])
        assert report(places).problems == (
            "no supervisor keeps the descriptors: a restart loses the weights",
        )
    finally:
        end(daemon)


def test_descriptors_are_stored_again_when_a_supervisor_comes_back(
    places: Places, store: Store, start: Start
) -> None:
    places.write_config(publish_config())
    start()
    published(places, store, [content(b"a")])
    close_all(list(store.fds.values()))
    store.fds.clear()
    with Control.connect(places.rank(), "operator") as control:
        control.channel.send(StoreAgain())
        store.serve(lambda: len(store.fds) == 3)
        store.said.clear()
        store.serve(lambda: "READY=1" in store.said)
        assert receive_reply(control.channel, Stored).count == 3
    assert head(store.fds["g1.slab.0"]) == content(b"a")


def test_sigterm_ends_the_daemon_in_order(places: Places, store: Store, start: Start) -> None:
    places.write_config(publish_config())
    daemon = start()
    published(places, store, [content(b"a")])
    assert places.rank().ready_file.exists()
    assert end(daemon, signal.SIGTERM) == 0
    store.serve(lambda: "STOPPING=1" in store.said)
    assert not places.rank().ready_file.exists()
    assert not places.rank().socket.exists()


def test_stale_socket_and_ready_file_of_a_killed_daemon_are_replaced(
    places: Places, store: Store, start: Start
) -> None:
    places.write_config(publish_config())
    first = start()
    published(places, store, [content(b"a")])
    end(first)
    close_all(list(store.fds.values()))
    store.fds.clear()
    assert places.rank().ready_file.exists()
    start()
    assert not places.rank().ready_file.exists()
    assert report(places).state is RankState.EMPTY


def test_weights_of_another_model_are_not_taken(places: Places, store: Store, start: Start) -> None:
    places.write_config(publish_config())
    start()
    other = manifest(fingerprint=msgspec.structs.replace(FINGERPRINT, model="other"))
    with Control.connect(places.rank(), "loader") as loader, offered(other, [content(b"a")]) as fds:
        loader.request(AskLoad(source="engine"), LoadOrder)
        with pytest.raises(
            WcacheError, match="published weights are not the wanted ones: model: cached other"
        ):
            loader.request(Publish(slabs=other.slabs), Published, fds)
    assert report(places).state is RankState.EMPTY


def test_nobody_listening_is_said_in_a_line(places: Places) -> None:
    with pytest.raises(NoSuchRankError, match="no daemon answers for rank 0"):
        Control.connect(places.rank(), "operator")


def test_generation_of_another_version_is_kept_and_told(
    places: Places, store: Store, start: Start
) -> None:
    """An upgrade must not free what only the version before can read."""
    places.write_config(publish_config())
    first = start()
    published(places, store, [content(b"a")])
    end(first)
    described = msgspec.json.decode(os.pread(store.fds["g1.manifest"], 1 << 20, 0))
    described["version"] = 99
    os.close(store.fds["g1.manifest"])
    store.fds["g1.manifest"] = create_sealed("manifest", msgspec.json.encode(described))
    start()
    seen = report(places)
    assert seen.state is RankState.EMPTY
    assert "generation 1 is kept and can not be read: manifest has version 99" in seen.problems[0]
    assert {"g1.slab.0", "g1.manifest"} <= store.fds.keys()
    published(places, store, [content(b"b")])
    assert [held.number for held in report(places).generations] == [2]
    assert {"g1.slab.0", "g1.manifest", "g2.slab.0"} <= store.fds.keys()


def of_another_version(places: Places, store: Store, start: Start, *slabs: bytes) -> str:
    """Has a generation of ``slabs`` be stored, of a wcache to come; its manifest's digest."""
    first = start()
    published(places, store, list(slabs))
    end(first)
    described = msgspec.json.decode(os.pread(store.fds["g1.manifest"], 1 << 20, 0))
    described["version"] = 99
    data = msgspec.json.encode(described)
    os.close(store.fds["g1.manifest"])
    store.fds["g1.manifest"] = create_sealed("manifest", data)
    return manifests.digest(data)


def test_a_lease_on_a_generation_of_another_version_is_not_lost_for_good(
    places: Places, store: Store, start: Start
) -> None:
    """A daemon of that version may come back, and take it up again."""
    places.write_config(publish_config())
    digest = of_another_version(places, store, start, content(b"a"))
    start()
    for held in ([], [2]):
        with Control.connect(places.rank(), "client") as control:
            with pytest.raises(NotReadyError, match="generation 1 is kept and can not be read"):
                control.request(Renew(manifest_digest=digest, can_offer=True), Leased)
        assert [one.number for one in report(places).generations] == held
        if not held:
            published(places, store, [content(b"b")])


def test_a_generation_of_another_version_is_not_freed_for_a_broken_configuration(
    places: Places, store: Store, start: Start
) -> None:
    """A downgrade may meet both: a daemon that ended would end the store with it."""
    file = places.write_config(publish_config())
    of_another_version(places, store, start, content(b"a"))
    os.close(store.fds.pop("config"))
    file.write_text(file.read_text() + "\n[weather]\nsun = true\n")
    start()
    seen = report(places)
    assert seen.state is RankState.EMPTY
    assert any("weather: unknown key" in problem for problem in seen.problems)
    assert any("generation 1 is kept and can not be" in problem for problem in seen.problems)
    assert {"g1.slab.0", "g1.manifest"} <= store.fds.keys()


def test_a_generation_of_another_version_is_not_freed_for_a_load_that_fails(
    places: Places, store: Store, start: Start
) -> None:
    """There may be no room for a second copy beside what is kept."""
    places.write_config(publish_config())
    of_another_version(places, store, start, content(b"a"))
    model = ModelSection(path="/models/other")
    places.write_config(msgspec.structs.replace(publish_config(), model=model))
    daemon = start()
    with Control.connect(places.rank(), "loader") as control:
        control.request(AskLoad(), LoadOrder)
        control.tell(LoadFailed(message="no room"))
    wait_for(lambda: "the last load failed: no room" in report(places).problems, "it is told")
    assert report(places).state is RankState.EMPTY
    assert daemon.poll() is None
    assert {"g1.slab.0", "g1.manifest"} <= store.fds.keys()


def test_a_supervisor_that_takes_over_is_given_generations_of_another_version(
    places: Places, store: Store, start: Start
) -> None:
    places.write_config(publish_config())
    of_another_version(places, store, start, content(b"a"), content(b"b"))
    model = ModelSection(path="/models/other")
    places.write_config(msgspec.structs.replace(publish_config(), model=model))
    start()
    assert report(places).expected_fds == len(store.fds) == 4
    close_all(list(store.fds.values()))
    store.fds.clear()
    with Control.connect(places.rank(), "operator") as control:
        control.channel.send(StoreAgain())
        store.serve(lambda: len(store.fds) == 4)
        store.said.clear()
        store.serve(lambda: "READY=1" in store.said)
        assert receive_reply(control.channel, Stored).count == 4
    assert head(store.fds["g1.slab.1"]) == content(b"b")


def test_a_connection_is_one_lease(places: Places, store: Store, start: Start) -> None:
    places.write_config(publish_config())
    start()
    published(places, store, [content(b"a")])
    with Control.connect(places.rank(), "client") as control:
        _, fds = attach(control)
        close_all(fds)
        with pytest.raises(WcacheError, match="this connection is a lease already"):
            control.request(Attach(), Attached)


def test_what_a_peer_says_is_no_message_to_the_supervisor(
    places: Places, store: Store, start: Start
) -> None:
    places.write_config(publish_config())
    start()
    published(places, store, [content(b"a")])
    places.write_config(with_model("next-model"))
    with Control.connect(places.rank(), "loader") as loader:
        loader.request(AskLoad(source="engine"), LoadOrder)
        loader.tell(LoadFailed(message="x\nFDSTOREREMOVE=1\nFDNAME=g1.manifest\n"))
        wait_for(lambda: report(places).state is RankState.READY, "the load has failed")
    store.serve(lambda: any("FDNAME=g1.manifest" in line for line in store.said))
    assert "g1.manifest" in store.fds
    assert "FDSTOREREMOVE=1" not in [line.strip() for line in store.said[-3:]]


def test_old_generation_stays_until_the_new_one_is_stored(
    places: Places, store: Store, start: Start
) -> None:
    """Nobody takes the descriptors of the new generation: the old one must stay in the store."""
    places.write_config(publish_config())
    start()
    published(places, store, [content(b"a")])
    places.write_config(with_model("next-model"))
    following = manifest(fingerprint=msgspec.structs.replace(FINGERPRINT, model="next-model"))
    with (
        Control.connect(places.rank(), "loader") as loader,
        offered(following, [content(b"b")]) as fds,
    ):
        loader.request(AskLoad(source="engine"), LoadOrder)
        loader.request(Publish(slabs=following.slabs), Published, fds)
    seen = report(places)
    assert [held.number for held in seen.generations] == [1, 2]
    assert "did not confirm" in seen.problems[0]
    store.serve(lambda: "g2.manifest" in store.fds and "g1.manifest" not in store.fds)
    assert report(places).problems == ()
