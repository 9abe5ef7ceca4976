"""Each check of doctor finds its fault, says how to mend it, and is content without it."""

import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

import wcache
from tests.checkpoints import llama_tensors, write_checkpoint, write_llama
from tests.places import Places, publish_config
from tests.users import NOBODY, without_privileges
from wcache.checkpoint import identify, open_checkpoint
from wcache.config import AccessSection, Config, LayoutSection, MemorySection, ModelSection
from wcache.daemon.ready import Ready
from wcache.difference import Difference
from wcache.doctor import (
    CHECKS,
    Check,
    Evidence,
    Finding,
    Machine,
    Manager,
    diagnose,
    gather,
    memory,
    model,
    ranks,
    service,
    state,
)
from wcache.doctor import gpu as gpu_checks
from wcache.errors import NoPermissionError, TryAgainError, WcacheError
from wcache.fingerprint import Fingerprint
from wcache.install import Target, install, plan
from wcache.machine.devices import Gpu
from wcache.protocol.messages import Report
from wcache.protocol.reports import GenerationReport, LeaseReport, ProgressReport
from wcache.ranks import RankView
from wcache.state import RankState
from wcache.supervise.direct.client import DirectSupervisor
from wcache.supervise.interface import Supervisor, UnitReport

pytestmark = pytest.mark.unit

NOW = time.time()
GPU = Gpu(index=0, uuid="GPU-aa", name="H200", total_bytes=8 << 30, free_bytes=4 << 30,
          persistence=True)  # fmt: skip
Make = Callable[..., Evidence]


@pytest.fixture
def evidence(places: Places) -> Make:
    """A machine on which nothing is wrong, but for what a test says."""

    def make(**changes: Any) -> Evidence:
        usual: dict[str, Any] = {
            "instance": places.instance(),
            "manager": manager(places),
            "machine": machine(places),
            "now": NOW,
        }
        return Evidence(**(usual | changes))

    return make


def manager(places: Places, version: int = 252, **changes: Any) -> Manager:
    return Manager(version=version, target=Target.system(places.root / "root"), **changes)


def machine(places: Places, available_kib: int = 1 << 20, free_pages: int = 0) -> Machine:
    proc, pages = places.root / f"proc{available_kib}", places.root / f"pages{free_pages}"
    for folder in (proc, pages):
        folder.mkdir(exist_ok=True)
    (proc / "meminfo").write_text(f"MemAvailable: {available_kib} kB\n")
    (pages / "free_hugepages").write_text(f"{free_pages}\n")
    return Machine(
        meminfo=proc, hugepages=pages, shm=Path("/dev/shm"), linger=places.root / "linger",
        mps_pipes=places.root / "mps",
    )  # fmt: skip


def results(check: Check, found: Evidence) -> list[str]:
    return [finding.result for finding in check(found)]


def only(check: Check, found: Evidence) -> Finding:
    (finding,) = check(found)
    return finding


def report(rank: int = 0, **changes: Any) -> Report:
    usual: dict[str, Any] = {
        "instance": "", "rank": rank, "pid": 4711, "version": wcache.__version__,
        "state": RankState.READY, "status": "ready", "since": NOW - 60,
    }  # fmt: skip
    return Report(**(usual | changes))


def serving(fingerprint: Fingerprint) -> GenerationReport:
    return GenerationReport(
        number=1, serving=True, how="loaded", manifest_digest="sha256:0", fingerprint=fingerprint,
        fingerprint_digest=fingerprint.digest(), weight_bytes=1, slab_bytes=2 << 20, slabs=1,
        storages=1, tensors=1, since=NOW - 60,
    )  # fmt: skip


def loading() -> ProgressReport:
    return ProgressReport(
        generation=2, loader_pid=4712, phase="read", done_bytes=1, total_bytes=2, since=NOW - 1
    )


def unit(rank: int = 0, **changes: Any) -> UnitReport:
    usual: dict[str, Any] = {"state": "active", "main_pid": 4711}
    return UnitReport(rank=rank, **(usual | changes))


def up(rank: int = 0, told: Report | None = None, **unit_changes: Any) -> dict[int, RankView]:
    view = RankView(rank=rank, report=told or report(rank), unit=unit(rank, **unit_changes))
    return {rank: view}


def checkpoint_config(folder: Path, **memory_changes: Any) -> Config:
    content = identify(open_checkpoint(folder)).digest
    return Config(
        model=ModelSection(path=str(folder), content=content),
        memory=MemorySection(slab_bytes=2 << 20, **memory_changes),
    )


# --- the service manager ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "words"),
    [(0, "none runs here"), (252, "stop frees them"), (254, "crash and stop")],
)
def test_the_version_of_systemd_says_what_stop_does(
    version: int, words: str, evidence: Make, places: Places
) -> None:
    finding = only(service.check_systemd, evidence(manager=manager(places, version)))
    assert finding.result == "ok"
    assert words in finding.detail


class Units:
    def __init__(self, places: Places, evidence: Make) -> None:
        self.target = Target.system(places.root / "root")
        # An interpreter that is there, wherever the tests run.
        self.planned = plan(self.target, python="/bin/sh", systemd_version=252)
        self.places = places
        self._evidence = evidence

    def install(self) -> None:
        for _ in install(self.target, self.planned, dry_run=False):
            pass

    def check(self, **changes: Any) -> list[Finding]:
        found = self._evidence(manager=manager(self.places, **changes))
        return list(service.check_units(found, self.planned))


@pytest.fixture
def units(places: Places, evidence: Make) -> Units:
    return Units(places, evidence)


def test_units_that_are_not_installed_are_offered(units: Units) -> None:
    (finding,) = units.check()
    assert (finding.result, finding.mend) == ("warn", "wcache install")


def test_no_units_are_asked_for_where_there_is_no_systemd(units: Units) -> None:
    assert units.check(version=0) == []


def test_installed_units_are_as_shipped(units: Units) -> None:
    units.install()
    assert [finding.result for finding in units.check()] == ["ok"]


def test_a_unit_that_is_missing_edited_or_old_is_named(units: Units) -> None:
    units.install()
    (units.target.units / "wcache-load@.service").unlink()
    with (units.target.units / "wcache.target").open("a") as file:
        file.write("# mine\n")
    other = plan(units.target, python="/bin/ls", systemd_version=252)
    old = next(one for one in other if one.path.name == "wcache@.service")
    old.path.write_bytes(old.data)
    found = units.check()
    details = " ".join(finding.detail for finding in found)
    assert {finding.result for finding in found} == {"fail", "warn"}
    assert "missing: wcache-load@.service" in details
    assert "of another wcache or python: wcache@.service" in details
    assert "edited by hand" in details


def test_a_masked_and_an_overridden_unit_are_named(units: Units) -> None:
    units.install()
    etc = units.places.root / "etc-systemd"
    etc.mkdir()
    (etc / "wcache.target").symlink_to("/dev/null")
    (etc / "wcache@.service").write_text("[Service]\n")
    found = {finding.result: finding for finding in units.check(overrides=(etc,))}
    assert found["fail"].mend == "systemctl unmask wcache.target"
    assert found["warn"].mend == "systemctl revert wcache@.service"


def test_units_of_an_environment_that_was_moved_are_named(units: Units) -> None:
    units.planned = plan(units.target, python="/gone/python", systemd_version=252)
    units.install()
    (finding,) = units.check()
    assert finding.result == "fail"
    assert "start /gone/python, which is gone" in finding.detail


def test_an_absent_group_is_said(evidence: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "GROUP", "no-such-group-here")
    assert only(service.check_group, evidence()).mend == "groupadd -r no-such-group-here"
    monkeypatch.setattr(service, "GROUP", "root")
    assert results(service.check_group, evidence()) == ["ok"]


def test_a_user_who_does_not_linger_is_warned(evidence: Make, places: Places) -> None:
    import pwd

    target = Target.user(places.root / "config")
    found = evidence(manager=Manager(version=252, target=target))
    assert only(service.check_linger, found).mend == "loginctl enable-linger"
    name = pwd.getpwuid(os.getuid()).pw_name
    (found.machine.linger).mkdir()
    (found.machine.linger / name).touch()
    assert results(service.check_linger, found) == ["ok"]


def test_a_folder_in_which_others_could_write_is_a_fault(evidence: Make, places: Places) -> None:
    run = places.instance().run
    found = evidence()
    assert results(service.check_folders, found) == ["ok"]
    run.mkdir()
    run.chmod(0o755)
    assert results(service.check_folders, found) == ["ok"]
    run.chmod(0o777)
    finding = only(service.check_folders, found)
    assert (finding.result, finding.mend) == ("fail", f"chmod go-w {run}")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_folder_of_another_user_is_a_fault(evidence: Make, places: Places) -> None:
    run = places.instance().run
    run.mkdir()
    os.chown(run, 1234, -1)
    finding = only(service.check_folders, evidence())
    assert finding.result == "fail"
    assert "uid 1234" in finding.detail
    # There may be live ranks in it, and they are not ours to end.
    assert "rm" not in finding.mend.split()


@pytest.mark.skipif(os.geteuid() != 0, reason="has another user listen")
def test_a_live_rank_of_another_user_is_no_leftover(evidence: Make, places: Places) -> None:
    write_ready(places, 4711)
    places.root.chmod(0o755)
    places.rank().folder.chmod(0o777)
    with ExitStack() as stack:
        with without_privileges():
            stack.enter_context(listening(places))
        finding = only(ranks.check_leftovers, evidence())
    assert finding.result == "warn"
    assert f"answered by uid {NOBODY}" in finding.detail
    assert "WCACHE_RUN_DIR" in finding.mend


def test_a_folder_that_is_closed_to_those_who_may_attach_is_a_fault(
    evidence: Make, places: Places
) -> None:
    run = places.instance().run
    run.mkdir()
    run.chmod(0o700)
    config = publish_config(access=AccessSection(uids=(1234,)))
    assert only(service.check_folders, evidence(config=config)).mend == f"chmod go+x {run}"
    assert results(service.check_folders, evidence(config=publish_config())) == ["ok"]


def test_a_socket_with_another_mode_than_configured_is_named(
    evidence: Make, places: Places
) -> None:
    with listening(places):
        places.rank().socket.chmod(0o666)
        finding = only(service.check_folders, evidence(config=publish_config(), views=up()))
    assert finding.result == "warn"
    assert "has mode 666" in finding.detail
    assert finding.mend == "wcache restart 0"


# --- what runs and what is left ------------------------------------------------------------------


@contextmanager
def listening(places: Places) -> Iterator[None]:
    """A socket in the rank's place that answers to connect(2)."""
    path = places.rank().socket
    path.parent.mkdir(parents=True, mode=0o755, exist_ok=True)
    if path.parent.parent.stat().st_uid == os.geteuid():
        path.parent.parent.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen()
        yield


def test_a_daemon_that_is_silent_failed_or_old_is_named(evidence: Make) -> None:
    assert results(ranks.check_ranks, evidence(views=up())) == ["ok"]
    silent = {0: RankView(rank=0, silence="no answer", unit=unit())}
    assert only(ranks.check_ranks, evidence(views=silent)).mend == "wcache restart 0"
    failed = {0: RankView(rank=0, unit=unit(state="failed", status="no such file"))}
    assert "no such file" in only(ranks.check_ranks, evidence(views=failed)).detail
    masked = evidence(views=up(fault="it is masked", mend="systemctl unmask it"))
    assert only(ranks.check_ranks, masked).mend == "systemctl unmask it"
    old = evidence(views=up(told=report(version="0.0.1")))
    assert "runs wcache 0.0.1" in only(ranks.check_ranks, old).detail
    troubled = evidence(views=up(told=report(problems=("bad file",))))
    assert only(ranks.check_ranks, troubled).result == "fail"


def test_a_daemon_that_ends_again_and_again_is_a_fault(evidence: Make) -> None:
    looping = {0: RankView(rank=0, unit=unit(state="restarting", main_pid=0, result="exit 1"))}
    finding = only(ranks.check_ranks, evidence(views=looping))
    assert (finding.result, finding.mend) == ("fail", "wcache logs 0")
    assert "exit 1" in finding.detail


def test_a_loader_that_failed_before_any_weights_is_a_fault(evidence: Make) -> None:
    told = report(state=RankState.EMPTY, generations=())
    empty = evidence(views=up(told=told, loader="failed", loader_result="exit 1"))
    assert "the loader failed: exit 1" in only(ranks.check_ranks, empty).detail
    told = report(generations=(serving(Fingerprint()),))
    kept = evidence(views=up(told=told, loader="failed", loader_result="exit 1"))
    assert results(ranks.check_ranks, kept) == ["ok"]


def test_a_rank_of_the_configuration_that_is_down_is_named(evidence: Make, places: Places) -> None:
    down = RankView(rank=1, unit=unit(1, state="inactive", main_pid=0))
    config = msgspec.structs.replace(publish_config(), layout=LayoutSection(dp=2))
    found = evidence(config=config, views={**up(), 1: down})
    finding = only(ranks.check_ranks, found)
    assert (finding.result, finding.mend) == ("warn", "wcache up")
    assert "rank 1" in finding.detail
    named = evidence(config=config, views={1: down}, instance=places.instance("draft"))
    mends = [finding.mend for finding in diagnose(named, []).findings]
    assert "wcache up --instance draft" in mends
    # One that is not part of it is down for good.
    assert results(ranks.check_ranks, evidence(config=publish_config(), views={1: down})) == ["ok"]


def test_weights_that_the_configuration_does_not_want_are_a_fault(evidence: Make) -> None:
    told = report(
        generations=(serving(Fingerprint()),),
        differences=(Difference(field="dtype", cached="auto", wanted="float16"),),
    )
    finding = only(ranks.check_ranks, evidence(views=up(told=told)))
    assert finding.result == "fail"
    assert "rank 0 serves other weights" in finding.detail
    assert "dtype: cached auto, wanted float16" in finding.detail
    assert finding.mend == "wcache up, or under running engines wcache warm"
    published = evidence(config=publish_config(), views=up(told=told))
    assert only(ranks.check_ranks, published).mend.startswith("wcache down, once no engine")
    # Of two commands at once one is refused.
    at_work = msgspec.structs.replace(told, progress=loading())
    finding = only(ranks.check_ranks, evidence(views=up(told=at_work)))
    assert finding.mend.startswith("others are being loaded: wcache status")


def test_what_no_boot_brings_back_is_said(evidence: Make, places: Places) -> None:
    config, views = publish_config(), up(boots=True)
    assert results(service.check_boot, evidence(config=config, views=views)) == []
    units = manager(places).target.units
    units.mkdir(parents=True)
    (units / "wcache@.service").touch()
    good = evidence(config=config, views=views, supervisor="systemd")
    assert results(service.check_boot, good) == ["ok"]
    off = evidence(config=config, views=up(boots=False), supervisor="systemd")
    finding = only(service.check_boot, off)
    assert (finding.result, finding.mend) == ("warn", "wcache up enables it")
    aside = only(service.check_boot, evidence(config=config, views=up(), supervisor="direct"))
    assert aside.mend.startswith("wcache down, then wcache up")
    down = {0: RankView(rank=0, unit=unit(state="inactive", main_pid=0, boots=False))}
    assert results(service.check_boot, evidence(config=config, views=down)) == []


def test_a_unit_that_wants_the_socket_of_a_daemon_it_has_not_is_named(evidence: Make) -> None:
    finding = only(ranks.check_ranks, evidence(views=up(), rivals=(0,)))
    assert finding.result == "fail"
    assert finding.mend.startswith("wcache down ")


def test_ranks_that_can_not_be_asked_are_a_fault(evidence: Make) -> None:
    finding = only(ranks.check_ranks, evidence(silence="permission denied"))
    assert finding.result == "fail"


def test_descriptors_that_the_supervisor_does_not_keep_are_a_fault(evidence: Make) -> None:
    told = report(expected_fds=3)
    good = evidence(views=up(told=told, stored_fds=3))
    assert results(ranks.check_descriptors, good) == ["ok"]
    bad = evidence(views=up(told=told, stored_fds=1), supervisor="systemd")
    finding = only(ranks.check_descriptors, bad)
    assert finding.result == "fail"
    assert "systemd keeps 1 of 3" in finding.detail
    assert finding.mend.startswith("wcache restart")
    small = evidence(views=up(told=told, stored_fds=1, max_fds=1), supervisor="systemd")
    assert "FileDescriptorStoreMax=3" in only(ranks.check_descriptors, small).mend


def test_a_daemon_that_has_outlived_its_supervisor_is_a_fault(evidence: Make) -> None:
    views = up(told=report(expected_fds=3), state="inactive", main_pid=0)
    finding = only(ranks.check_descriptors, evidence(views=views))
    assert (finding.check, finding.result) == ("supervisor", "fail")
    assert "pid 4711" in finding.detail
    assert finding.mend == "wcache up starts one that takes it over"
    # Under systemd it is not the supervisor that has ended.
    (finding,) = ranks.check_descriptors(evidence(views=views, supervisor="systemd"))
    assert finding.check == "descriptors"


class SilentSupervisor:
    kind = "direct"

    def __init__(self, error: WcacheError) -> None:
        self._error = error

    def show(self, _ranks: Iterable[int]) -> dict[int, UnitReport]:
        raise self._error


@pytest.mark.parametrize(
    ("error", "uid", "mend"),
    [
        (TryAgainError("it is stopped", hint="kill -CONT 7"), 0, "kill -CONT 7"),
        (TryAgainError("it is silent"), 0, "wcache logs --supervisor"),
        (NoPermissionError("no"), 1000, r"sudo .* doctor"),
        (NoPermissionError("no", hint="set WCACHE_RUN_DIR"), 0, "set WCACHE_RUN_DIR"),
    ],
)
def test_a_supervisor_that_can_not_be_asked_is_a_fault_with_what_helps(
    error: WcacheError, uid: int, mend: str, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    places.write_config(publish_config())
    supervisor = cast(Supervisor, SilentSupervisor(error))
    found = gather(places.instance(), supervisor, manager(places), NOW)
    finding = only(ranks.check_ranks, found)
    assert finding.result == "fail"
    assert re.fullmatch(mend, finding.mend)
    assert error.message in finding.detail
    # Nobody knows what it keeps.
    assert results(ranks.check_descriptors, found) == []


def test_descriptors_of_a_rank_that_is_gone_are_leftovers(evidence: Make) -> None:
    views = {2: RankView(rank=2, unit=unit(2, state="inactive", main_pid=0, stored_fds=4))}
    finding = only(ranks.check_descriptors, evidence(views=views))
    assert finding.result == "warn"
    assert "4 descriptors of rank 2" in finding.detail


def test_a_rank_that_is_in_no_configuration_is_a_leftover(evidence: Make) -> None:
    found = evidence(config=publish_config(), views=up(rank=1))
    assert only(ranks.check_leftovers, found).mend == "wcache down 1"
    assert results(ranks.check_leftovers, evidence(config=publish_config(), views=up())) == ["ok"]


def test_a_socket_that_nobody_listens_on_is_a_leftover(evidence: Make, places: Places) -> None:
    with listening(places):
        assert results(ranks.check_leftovers, evidence()) == ["ok"]
    finding = only(ranks.check_leftovers, evidence())
    assert (finding.result, finding.mend) == ("warn", f"rm -r {places.rank().folder}")


def test_what_a_rank_that_is_down_has_served_is_not_to_be_removed(
    evidence: Make, places: Places
) -> None:
    """An engine that still has the weights gives them back by it."""
    with listening(places):
        pass  # as of a daemon that was killed, with its supervisor
    places.rank().ready_file.write_text("{}")
    finding = only(ranks.check_leftovers, evidence(config=publish_config()))
    assert (finding.result, finding.mend) == ("fail", "wcache up")
    places.rank().ready_file.unlink()
    assert results(ranks.check_leftovers, evidence(config=publish_config())) == ["ok"]
    unread = only(ranks.check_leftovers, evidence(problems=("model.path: is a number",)))
    assert (unread.result, unread.mend) == (
        "warn", "wcache up, once the configuration can be read",
    )  # fmt: skip


@pytest.mark.parametrize("closed", ["the socket", "the rank's folder", "the run folder"])
def test_a_live_rank_that_this_user_may_not_look_at_is_no_leftover(
    closed: str, evidence: Make, places: Places
) -> None:
    places.root.chmod(0o755)
    write_ready(places, 4711)
    paths = places.rank()
    at = {"the socket": paths.socket, "the rank's folder": paths.folder}
    found = evidence()
    with listening(places):
        barrier = at.get(closed, places.instance().run)
        barrier.chmod(0)
        with without_privileges():
            finding = only(ranks.check_leftovers, found)
        barrier.chmod(0o700)
    assert finding.result == "warn"
    assert f"{barrier} (mode 0) is open to " in finding.detail
    assert "can not be looked at" in finding.detail
    assert not finding.mend.startswith("rm")


def test_files_are_nobodys_only_where_the_ranks_could_be_asked(
    evidence: Make, places: Places
) -> None:
    with listening(places):
        pass
    places.rank().ready_file.touch()
    finding = only(ranks.check_leftovers, evidence(silence="no"))
    assert finding.result == "warn"
    assert "not known" in finding.detail
    assert not finding.mend.startswith("rm")


def test_what_this_user_may_not_read_is_said_of_run_folder_and_configuration(
    evidence: Make, places: Places
) -> None:
    places.root.chmod(0o755)
    instance = places.instance()
    places.write_config(publish_config())
    for folder in (instance.run, instance.config):
        folder.mkdir(exist_ok=True)
        folder.chmod(0)
    with without_privileges():
        found = gather(instance, DirectSupervisor(""), manager(places), NOW)
        sockets = only(service.check_folders, found)
        configuration = only(model.check_configuration, found)
    places.root.chmod(0)
    with without_privileges():
        outside = only(service.check_folders, found)
    places.root.chmod(0o755)
    for folder in (instance.run, instance.config):
        folder.chmod(0o700)
    assert f"{instance.run} (mode 0) is open to " in sockets.detail
    assert f"{instance.config} (mode 0) is open to " in configuration.detail
    assert "edit" not in configuration.mend
    assert f"{places.root} (mode 0)" in outside.detail
    assert "(mode 0)" in found.silence


def write_ready(places: Places, pid: int) -> None:
    ready = Ready(pid=pid, invocation_id="", generation=1, fingerprint_digest="x", bytes=1,
                  tensors=1, how="loaded", since=NOW)  # fmt: skip
    places.rank().folder.mkdir(parents=True)
    places.rank().ready_file.write_bytes(msgspec.json.encode(ready))


def test_a_ready_file_without_a_daemon_is_a_fault(evidence: Make, places: Places) -> None:
    write_ready(places, 4711)
    finding = only(ranks.check_leftovers, evidence())
    assert (finding.result, finding.mend) == ("fail", f"rm {places.rank().ready_file}")


def test_a_ready_file_of_another_daemon_is_a_fault(evidence: Make, places: Places) -> None:
    write_ready(places, 4711)
    told = report(generations=(serving(Fingerprint()),))
    assert results(ranks.check_leftovers, evidence(views=up(told=told))) == ["ok"]
    other = evidence(views=up(told=msgspec.structs.replace(told, pid=4712)))
    assert only(ranks.check_leftovers, other).result == "fail"
    places.rank().ready_file.write_text("{")
    assert "can not be read" in only(ranks.check_leftovers, other).detail


# --- configuration and checkpoint ----------------------------------------------------------------


def test_every_problem_of_a_configuration_is_a_fault(evidence: Make, places: Places) -> None:
    found = evidence(problems=("a: bad", "b: bad"))
    assert results(model.check_configuration, found) == ["fail", "fail"]
    assert results(model.check_configuration, evidence()) == ["warn"]
    assert results(model.check_configuration, evidence(config=publish_config())) == ["ok"]


def test_a_checkpoint_that_changed_is_a_fault(evidence: Make, tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    config = checkpoint_config(folder)
    held = Fingerprint(content=config.model.content)
    views = up(told=report(generations=(serving(held),)))
    assert results(model.check_checkpoint, evidence(config=config, views=views)) == ["ok"]
    write_checkpoint(folder, llama_tensors(seed=1))
    found = list(model.check_checkpoint(evidence(config=config, views=views)))
    assert [finding.result for finding in found] == ["fail", "fail"]
    assert "rank 0 serves the old" in found[1].detail
    assert found[1].mend == f"wcache up --model {folder} … loads it as it is now"
    # wcache up is refused while an engine uses what it would replace.
    engine = LeaseReport(pid=900, uid=7, command="serve.py", generation=1, since=NOW)
    used = up(told=report(generations=(serving(held),), leases=(engine,)))
    found = list(model.check_checkpoint(evidence(config=config, views=used)))
    assert found[1].mend.startswith(f"wcache warm --model {folder} loads it")


def test_a_checkpoint_that_is_gone_matters_less_while_weights_are_served(
    evidence: Make, tmp_path: Path
) -> None:
    folder = write_llama(tmp_path / "model")
    config = checkpoint_config(folder)
    folder.rename(tmp_path / "moved")
    finding = only(model.check_checkpoint, evidence(config=config))
    assert finding.result == "fail"
    from wcache.fingerprint import wanted_by

    views = up(told=report(generations=(serving(wanted_by(config, 0)),)))
    assert only(model.check_checkpoint, evidence(config=config, views=views)).result == "warn"


def test_a_checkpoint_that_only_this_user_may_not_read_is_no_fault(
    evidence: Make, places: Places
) -> None:
    places.root.chmod(0o755)
    folder = write_llama(places.root / "models" / "llama")
    config = checkpoint_config(folder)
    stranger, owner = evidence(config=config, silence="no"), evidence(config=config)
    folder.parent.chmod(0)
    with without_privileges():
        unknown = only(model.check_checkpoint, stranger)
        fault = only(model.check_checkpoint, owner)
    folder.parent.chmod(0o755)
    assert (unknown.result, fault.result) == ("warn", "fail")
    assert "not known" in unknown.detail
    assert fault.mend.startswith(f"{folder.parent} (mode 0) is open to ")


@pytest.mark.parametrize("name", ["identity", "architecture"])
def test_a_folder_of_kept_answers_that_is_not_used_is_told_of(
    evidence: Make, places: Places, tmp_path: Path, name: str
) -> None:
    folder = places.instance().state / name
    folder.mkdir(parents=True, mode=0o700)
    assert results(state.check_state, evidence()) == ["ok"]
    folder.chmod(0o777)
    finding = only(state.check_state, evidence())
    assert (finding.result, finding.mend) == ("warn", f"rm -r {folder}")
    assert f"{folder} is open to others (mode 777)" in finding.detail
    folder.rmdir()
    folder.symlink_to(tmp_path)
    finding = only(state.check_state, evidence())
    assert (finding.result, finding.mend) == ("warn", f"rm {folder}")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_folder_of_kept_answers_of_another_user_is_told_of(
    evidence: Make, places: Places
) -> None:
    folder = places.instance().architecture_folder
    folder.mkdir(parents=True, mode=0o700)
    os.chown(folder, 1234, -1)
    finding = only(state.check_state, evidence())
    assert (finding.result, finding.mend) == ("warn", f"rm -r {folder}")
    assert f"{folder} belongs to uid 1234" in finding.detail


@pytest.mark.skipif(os.geteuid() != 0, reason="looks as another user")
@pytest.mark.parametrize("closed", ["state", "state/log", "state/log/wcache.1.daemon.log"])
def test_logs_that_can_not_be_written_are_a_fault(
    evidence: Make, places: Places, closed: str
) -> None:
    places.root.chmod(0o755)
    log = places.instance().log_file(1, "daemon")
    log.parent.mkdir(parents=True)
    log.touch()
    for path in (log, log.parent, log.parent.parent):
        os.chown(path, NOBODY, -1)
    found = evidence(config=publish_config(layout=LayoutSection(tp=2)))
    with without_privileges():
        assert results(state.check_state, found) == ["ok"]
    barrier = places.root / closed
    os.chown(barrier, 0, -1)
    barrier.chmod(0o700)
    with without_privileges():
        finding = only(state.check_state, found)
    assert (finding.result, finding.mend) == ("fail", state.ELSEWHERE)
    assert f"{barrier} (mode 700) is open to root alone" in finding.detail


def test_a_file_in_the_place_of_the_logs_is_a_fault(evidence: Make, places: Places) -> None:
    state_folder = places.instance().state
    state_folder.touch()
    finding = only(state.check_state, evidence())
    assert (finding.result, finding.mend) == ("fail", f"mv {state_folder} {state_folder}.old")


@pytest.mark.skipif(os.geteuid() != 0, reason="looks as another user")
def test_nothing_is_said_of_the_logs_of_others(evidence: Make, places: Places) -> None:
    places.instance().run.mkdir()
    places.instance().state.mkdir(mode=0o700)
    places.root.chmod(0o755)
    found = evidence()
    assert results(state.check_state, found) == ["ok"]
    with without_privileges():
        assert results(state.check_state, found) == []


def test_files_and_daemons_from_the_future_are_noticed(evidence: Make, tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    config = checkpoint_config(folder)
    assert results(model.check_clock, evidence(config=config, now=time.time())) == ["ok"]
    os.utime(folder / "config.json", (NOW + 7200, NOW + 7200))
    finding = only(model.check_clock, evidence(config=config))
    assert "config.json" in finding.detail
    started = evidence(views=up(told=report(since=NOW + 7200)))
    assert results(model.check_clock, started) == ["warn"]


def test_absent_transformers_matter_where_weights_are_sharded(
    evidence: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import metadata

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert results(model.check_transformers, evidence()) == ["warn"]
    config = checkpoint_config(write_llama(tmp_path / "model"))
    config = msgspec.structs.replace(config, layout=LayoutSection(tp=3))
    assert results(model.check_transformers, evidence(config=config)) == ["fail"]


# --- memory --------------------------------------------------------------------------------------


def test_room_is_asked_for_only_while_weights_are_to_be_loaded(
    evidence: Make, places: Places, tmp_path: Path
) -> None:
    config = checkpoint_config(write_llama(tmp_path / "model"))
    assert results(memory.check_room, evidence(config=config)) == ["ok"]
    small = machine(places, available_kib=1)
    assert results(memory.check_room, evidence(config=config, machine=small)) == ["fail"]
    from wcache.fingerprint import wanted_by

    views = up(told=report(generations=(serving(wanted_by(config, 0)),)))
    served = evidence(config=config, machine=small, views=views)
    assert results(memory.check_room, served) == ["ok"]
    assert results(memory.check_room, evidence(config=publish_config())) == []


def test_a_share_is_of_the_final_dtype_and_of_one_rank(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    checkpoint = open_checkpoint(folder)
    config = checkpoint_config(folder)
    whole = memory.rank_bytes(checkpoint, config)
    assert whole == checkpoint.total_bytes
    wide = msgspec.structs.replace(config.model, dtype="float32")
    assert memory.rank_bytes(checkpoint, msgspec.structs.replace(config, model=wide)) == 2 * whole
    spread = msgspec.structs.replace(config, layout=LayoutSection(tp=2, pp=2))
    assert memory.rank_bytes(checkpoint, spread) == -(-whole // 4)


def test_room_on_a_gpu_is_that_of_the_ranks_own(evidence: Make, tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    config = checkpoint_config(folder, device="cuda", devices=(GPU.uuid,))
    assert results(memory.check_room, evidence(config=config, gpus=(GPU,))) == ["ok"]
    full = replace(GPU, free_bytes=0)
    finding = only(memory.check_room, evidence(config=config, gpus=(full,)))
    assert finding.result == "fail"
    assert "memory of GPU 0" in finding.detail


def test_hugepages_that_are_asked_for_and_not_free_are_said(
    evidence: Make, places: Places, tmp_path: Path
) -> None:
    folder = write_llama(tmp_path / "model")
    assert results(memory.check_hugepages, evidence(config=checkpoint_config(folder))) == []
    config = checkpoint_config(folder, hugepages=True)
    finding = only(memory.check_hugepages, evidence(config=config))
    assert finding.result == "warn"
    assert "vm.nr_hugepages) + 1" in finding.mend
    enough = evidence(config=config, machine=machine(places, free_pages=8))
    assert results(memory.check_hugepages, enough) == ["ok"]


def test_a_missing_dev_shm_is_said(evidence: Make, places: Places) -> None:
    gone = replace(machine(places), shm=places.root / "nowhere")
    assert results(memory.check_shm, evidence(machine=gone)) == ["warn"]
    assert results(memory.check_shm, evidence()) == ["ok"]


def test_a_small_dev_shm_matters_to_engines_of_several_ranks(
    evidence: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SHM_BYTES", 1 << 60)
    assert results(memory.check_shm, evidence()) == ["ok"]
    spread = evidence(config=publish_config(layout=LayoutSection(tp=2)))
    assert results(memory.check_shm, spread) == ["warn"]


@pytest.mark.parametrize(
    ("changes", "result"),
    [
        ({}, "ok"),
        ({"f_bavail": 0, "f_bfree": 0}, "fail"),
        ({"f_favail": 0, "f_ffree": 0}, "fail"),
        ({"f_bavail": 1000, "f_bfree": 1000}, "warn"),
        ({"f_flag": os.ST_RDONLY}, "warn"),
        ({"f_files": 0, "f_favail": 0, "f_ffree": 0}, "ok"),  # a file system without inodes
    ],
)
def test_a_full_or_closed_disk_is_said_of_the_folder_that_lies_on_it(
    changes: dict[str, int],
    result: str,
    evidence: Make,
    places: Places,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = {"f_frsize": 4096, "f_bavail": 1 << 20, "f_bfree": 1 << 20, "f_flag": 0,
             "f_files": 1 << 20, "f_favail": 1 << 20, "f_ffree": 1 << 20}  # fmt: skip
    state = places.instance().state
    state.mkdir(parents=True, exist_ok=True)

    def statvfs(path: Path) -> SimpleNamespace:
        return SimpleNamespace(**(usual | changes if path == state else usual))

    monkeypatch.setattr(os, "statvfs", statvfs)
    finding = only(memory.check_disk, evidence())
    assert finding.result == result
    assert (str(state) in finding.detail) == (result != "ok")
    assert ("df -i" in finding.mend) == (changes == {"f_favail": 0, "f_ffree": 0})


def test_a_low_limit_of_locked_memory_matters_where_gpus_are_used(
    evidence: Make, tmp_path: Path
) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    config = checkpoint_config(write_llama(tmp_path / "model"), device="cuda", devices=("GPU-aa",))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, before[1]))
    try:
        assert results(memory.check_memlock, evidence(config=config)) == ["warn"]
        assert results(memory.check_memlock, evidence()) == ["ok"]
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


# --- GPUs ----------------------------------------------------------------------------------------


def with_driver(places: Places, *modules: str, devices: tuple[str, ...]) -> Machine:
    """As /proc and /dev show a driver's modules and device files."""
    here = machine(places)
    dev, listed = places.root / "dev", places.root / "modules"
    dev.mkdir(exist_ok=True)
    for name in devices:
        (dev / name).touch()
    listed.write_text("".join(f"{name} 16384 0 - Live 0x0 (OE)\n" for name in ("ext4", *modules)))
    return replace(here, dev=dev, modules=listed)


@pytest.mark.parametrize(
    ("modules", "devices", "said"),
    [
        (("nvidia", "nvidia_uvm"), ("nvidia0", "nvidia-uvm"), ""),
        # In a container that is given the files, and another kernel's list or none of it.
        ((), ("nvidia0", "nvidia-uvm"), ""),
        (("nvidia", "nvidia_modeset"), ("nvidia0",), "the module is not loaded"),
        (("nvidia", "nvidia_modeset"), ("nvidia0", "nvidia-uvm"), "the module is not loaded"),
        (("nvidia", "nvidia_uvm"), ("nvidia0",), "nvidia-uvm is not there"),
        ((), ("nvidia0",), "nvidia-uvm is not there"),
        (("nvidia_uvm_of_mine", "nvidia"), ("nvidia0",), "the module is not loaded"),
    ],
)
def test_unified_memory_has_to_be_there_before_a_loader_under_systemd(
    modules: tuple[str, ...], devices: tuple[str, ...], said: str, evidence: Make, places: Places,
    on_gpu: Config,
) -> None:  # fmt: skip
    here = with_driver(places, *modules, devices=devices)
    for config, bad in ((on_gpu, "fail"), (None, "warn")):
        found = only(gpu_checks.check_unified_memory, evidence(machine=here, config=config))
        assert found.result == (bad if said else "ok")
        assert said in found.detail


def test_unified_memory_is_loaded_by_the_tool_that_is_there(
    evidence: Make, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = evidence(machine=with_driver(places, "nvidia", devices=("nvidia0",)))
    monkeypatch.setenv("PATH", str(places.root / "bin"))
    assert only(gpu_checks.check_unified_memory, found).mend == "modprobe nvidia-uvm"
    (places.root / "bin").mkdir()
    (places.root / "bin" / "nvidia-modprobe").touch(0o755)
    assert only(gpu_checks.check_unified_memory, found).mend == "nvidia-modprobe -u -c 0"


def test_unified_memory_is_not_asked_for_without_a_gpu(evidence: Make, places: Places) -> None:
    here = with_driver(places, devices=())
    assert results(gpu_checks.check_unified_memory, evidence(machine=here)) == []
    # The driver says that there is one, and its device file is not seen.
    found = evidence(machine=here, gpus=(GPU,))
    assert results(gpu_checks.check_unified_memory, found) == ["warn"]


@pytest.fixture
def on_gpu(tmp_path: Path) -> Config:
    return checkpoint_config(write_llama(tmp_path / "model"), device="cuda", devices=(GPU.uuid,))


def test_gpus_that_are_wanted_and_absent_are_a_fault(evidence: Make, on_gpu: Config) -> None:
    assert results(gpu_checks.check_driver, evidence()) == ["ok"]
    assert results(gpu_checks.check_driver, evidence(config=on_gpu)) == ["fail"]
    sick = evidence(driver_fault="NVML failed: unknown error")
    assert only(gpu_checks.check_driver, sick).mend == "nvidia-smi"
    other = replace(GPU, uuid="GPU-bb")
    found = evidence(config=on_gpu, gpus=(other,), driver="580.65")
    assert results(gpu_checks.check_driver, found) == ["fail", "ok"]


@pytest.mark.parametrize(
    ("persistence", "unused", "used"),
    [(True, "ok", "ok"), (False, "warn", "fail"), (None, "warn", "warn")],
)
def test_persistence_mode_matters_most_on_gpus_that_hold_weights(
    persistence: bool | None, unused: str, used: str, evidence: Make, on_gpu: Config
) -> None:
    gpus = (replace(GPU, persistence=persistence),)
    assert results(gpu_checks.check_persistence, evidence(gpus=gpus)) == [unused]
    assert results(gpu_checks.check_persistence, evidence(gpus=gpus, config=on_gpu)) == [used]
    assert results(gpu_checks.check_persistence, evidence()) == []


@pytest.mark.parametrize(
    ("change", "used"),
    [
        ({"mig": True}, "fail"),
        ({"compute_mode": "exclusive"}, "warn"),
        ({"compute_mode": "prohibited"}, "fail"),
    ],
)
def test_modes_that_keep_a_loader_out_are_said(
    change: dict[str, Any], used: str, evidence: Make, on_gpu: Config
) -> None:
    assert results(gpu_checks.check_modes, evidence(gpus=(GPU,))) == ["ok"]
    gpus = (replace(GPU, **change),)
    assert results(gpu_checks.check_modes, evidence(gpus=gpus)) == ["warn"]
    assert results(gpu_checks.check_modes, evidence(gpus=gpus, config=on_gpu)) == [used]


def test_an_mps_server_is_said(evidence: Make) -> None:
    found = evidence(gpus=(GPU,))
    found.machine.mps_pipes.mkdir()
    (found.machine.mps_pipes / "control").touch()
    assert results(gpu_checks.check_modes, found) == ["warn"]


def test_a_gpu_that_two_instances_name_is_said(evidence: Make, on_gpu: Config) -> None:
    found = evidence(config=on_gpu, others={"draft": on_gpu})
    finding = only(gpu_checks.check_claims, found)
    assert finding.mend == "wcache status --instance draft"
    assert results(gpu_checks.check_claims, evidence(config=on_gpu)) == []


def test_bindings_are_asked_for_only_where_there_are_gpus(evidence: Make, on_gpu: Config) -> None:
    from wcache.machine.devices import gpus

    assert results(gpu_checks.check_bindings, evidence()) == []
    if not gpus():
        # cuda-bindings or the driver is not here, and the configuration needs both.
        assert results(gpu_checks.check_bindings, evidence(config=on_gpu)) == ["fail"]


# --- all of them ---------------------------------------------------------------------------------


def test_every_finding_that_is_not_ok_says_what_mends_it(
    evidence: Make, on_gpu: Config, places: Places
) -> None:
    write_ready(places, 1)
    bad = evidence(
        config=on_gpu, gpus=(replace(GPU, persistence=False, mig=True),), silence="no",
        manager=manager(places), machine=machine(places, available_kib=1),
    )  # fmt: skip
    planned = plan(bad.manager.target, python="/bin/sh", systemd_version=252)
    found = diagnose(bad, planned)
    assert found.exit_code == 1
    for finding in found.findings:
        assert (finding.result == "ok") == (finding.mend == ""), finding
        assert "\n" not in finding.detail


def test_every_check_of_the_package_is_in_the_list() -> None:
    modules = (service, gpu_checks, memory, model, ranks, state)
    defined = {name for module in modules for name in vars(module) if name.startswith("check_")} - {
        "check_systemd",
        "check_units",
    }
    assert {getattr(check, "__name__", "") for check in CHECKS} == defined
