"""What every supervisor promises, asked of systemd and of wcache's own in the same words."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import pytest

from tests.places import Places, publish_config
from tests.processes import wait_for
from tests.publishing import publish
from tests.systemd.lab import CHECKOUT, SCRIPT, Lab
from wcache.config import LayoutSection, save_config
from wcache.errors import TryAgainError
from wcache.paths import InstancePaths
from wcache.ranks import ask
from wcache.supervise.direct.client import DirectSupervisor
from wcache.supervise.interface import Supervisor, UnitReport
from wcache.supervise.systemd.manager import SystemdSupervisor

pytestmark = [pytest.mark.systemd, pytest.mark.process]

INSTANCE = "contract"
WEIGHTS = [b"\x01" * (2 << 20), b"\x02" * (2 << 20)]
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Ground:
    """Ranks of which a supervisor has the care; 0 and 1 are in the configuration."""

    supervisor: Supervisor
    paths: InstancePaths
    kill: Callable[[str, int], object]

    def show(self, rank: int = 0) -> UnitReport:
        return self.supervisor.show([rank])[rank]

    def wait(self, state: str, rank: int = 0, *, not_pid: int = 0) -> UnitReport:
        def is_there() -> bool:
            unit = self.show(rank)
            return unit.state == state and (not not_pid or unit.main_pid not in (0, not_pid))

        wait_for(is_there, f"rank {rank} is {state}", PATIENCE_S)
        return self.show(rank)

    def up(self, rank: int = 0) -> UnitReport:
        self.supervisor.start([rank])
        return self.wait("active", rank)

    def digest(self, rank: int = 0) -> str | None:
        """Of the manifest that is served."""
        found = ask(self.paths.rank(rank))
        return found.serving.manifest_digest if found and found.serving else None


@pytest.fixture(params=["direct", "systemd"])
def ground(
    request: pytest.FixtureRequest, places: Places, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Ground]:
    made = (_direct if request.param == "direct" else _systemd)(places, lab, monkeypatch)
    save_config(publish_config(layout=LayoutSection(dp=2)), made.paths.config_file)
    yield made
    made.supervisor.shutdown()
    made.paths.config_file.unlink(missing_ok=True)


def _direct(places: Places, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Ground:
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))

    def kill(number: str, pid: int) -> None:
        os.kill(pid, signal.Signals[f"SIG{number}"])

    return Ground(DirectSupervisor(INSTANCE), places.instance(INSTANCE), kill)


def _systemd(places: Places, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Ground:
    """From here the lab's systemctl is the first that is found."""
    folder = places.root / "bin"
    folder.mkdir()
    for tool in ("systemctl", "journalctl"):
        script = folder / tool
        script.write_text(
            f'#!/bin/sh\nWCACHE_LAB={lab.folder}/lab exec {SCRIPT} exec -- {tool} "$@"\n'
        )
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return Ground(SystemdSupervisor(INSTANCE), lab.paths(INSTANCE), lab.kill)


def test_a_rank_that_nobody_started_is_inactive(ground: Ground) -> None:
    found = ground.supervisor.show([0, 7])
    assert not any(unit.boots for unit in found.values())  # False, or None where nothing boots
    known = {rank: msgspec.structs.replace(unit, boots=None) for rank, unit in found.items()}
    assert known == {0: UnitReport(rank=0), 7: UnitReport(rank=7)}
    assert ground.supervisor.show([]) == {}


def test_a_start_brings_it_up_and_a_second_changes_nothing(ground: Ground) -> None:
    first = ground.up()
    assert first.main_pid
    assert (first.restarts, first.result) == (0, "")
    assert "waiting for the first engine" in first.status
    ground.supervisor.start([0])
    assert ground.wait("active").main_pid == first.main_pid
    assert ground.show(1).state == "inactive"


def test_a_restart_keeps_what_is_stored(ground: Ground) -> None:
    first = ground.up()
    publish(ground.paths.rank(0), WEIGHTS)
    digest, stored = ground.digest(), ground.show().stored_fds
    assert stored > len(WEIGHTS)
    ground.supervisor.restart([0])
    second = ground.wait("active", not_pid=first.main_pid)
    assert ground.digest() == digest
    assert second.stored_fds == stored
    assert second.restarts == 0


def test_a_daemon_that_is_killed_comes_back_with_what_is_stored(ground: Ground) -> None:
    first = ground.up()
    publish(ground.paths.rank(0), WEIGHTS)
    digest, stored = ground.digest(), ground.show().stored_fds
    for count, number in enumerate(("KILL", "TERM"), start=1):
        pid = ground.show().main_pid
        ground.kill(number, pid)
        now = ground.wait("active", not_pid=pid)
        assert now.restarts == count
        assert now.stored_fds == stored
        assert ground.digest() == digest
    assert ground.show().main_pid != first.main_pid


def test_a_stop_drops_what_is_stored_and_can_be_said_again(ground: Ground) -> None:
    ground.up()
    publish(ground.paths.rank(0), WEIGHTS)
    for _ in range(2):
        ground.supervisor.stop([0])
        unit = ground.show()
        assert (unit.state, unit.main_pid, unit.stored_fds, unit.result) == ("inactive", 0, 0, "")
        assert unit.loader == "inactive"
    assert ground.digest() is None
    ground.up()
    assert ground.digest() is None


def test_a_daemon_without_a_configuration_fails_for_good(ground: Ground) -> None:
    config = ground.paths.config_file
    aside = config.rename(config.with_suffix(".aside"))
    try:
        ground.supervisor.start([0])
        unit = ground.wait("failed")
    finally:
        aside.rename(config)
    assert (unit.result, unit.restarts, unit.stored_fds) == ("exit 78", 0, 0)
    ground.up()


def test_a_loader_is_run_for_a_rank_that_is_up_only(ground: Ground) -> None:
    with pytest.raises(TryAgainError, match="is not up"):
        ground.supervisor.load([0])
    ground.up()
    ground.supervisor.load([0])
    wait_for(lambda: ground.show().loader == "inactive", "nothing was to be loaded", PATIENCE_S)
    assert ground.show().loader_result == ""


def test_one_rank_is_stopped_without_the_other_and_all_at_last(ground: Ground) -> None:
    first, second = ground.up(0), ground.up(1)
    ground.supervisor.stop([0])
    assert ground.show(0).state == "inactive"
    assert ground.show(1).main_pid == second.main_pid != first.main_pid
    ground.supervisor.shutdown()
    assert ground.show(1).state == "inactive"


def test_enabling_and_disabling_leave_alone_what_runs(ground: Ground) -> None:
    first = ground.up()
    for _ in range(2):
        ground.supervisor.enable([0, 1])
    for _ in range(2):
        ground.supervisor.disable([0, 1])
    assert ground.wait("active").main_pid == first.main_pid
