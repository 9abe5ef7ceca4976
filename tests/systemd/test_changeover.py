"""Other weights under systemd: two generations in its store, and the right one served after it."""

from pathlib import Path

import pytest

from tests.checkpoints import llama_tensors, write_checkpoint
from tests.processes import wait_for
from tests.systemd.lab import Lab, daemon, engine
from wcache.protocol.messages import Report

pytestmark = pytest.mark.systemd

SMALL = ("--device", "cpu", "--slab-bytes", "2MiB")
PATIENCE_S = 60.0


def model(lab: Lab, name: str, seed: int) -> str:
    folder = write_checkpoint(lab.models / name, llama_tensors(seed=seed))
    for file in (folder, *folder.iterdir()):
        file.chmod(0o755 if file.is_dir() else 0o644)
    return str(Path("/srv/models") / name)


def report(lab: Lab, instance: str) -> Report:
    found = lab.report(0, instance)
    assert found is not None
    return found


def parts(lab: Lab, instance: str) -> dict[int, str]:
    return {held.number: held.role for held in report(lab, instance).generations}


def kill_and_wait(lab: Lab, instance: str) -> None:
    before = report(lab, instance)
    lab.kill("KILL", before.pid)

    def is_back() -> bool:
        found = lab.report(0, instance)
        return found is not None and found.pid != before.pid and found.serving is not None

    wait_for(is_back, "a new daemon that serves", PATIENCE_S)


def check_store(lab: Lab, instance: str) -> None:
    assert lab.stored(instance) == report(lab, instance).expected_fds


def test_the_choice_of_generation_outlives_restart_and_kill(lab: Lab, instance: str) -> None:
    first, second = model(lab, "first", 1), model(lab, "second", 2)
    lab.wcache("up", "--instance", instance, "--model", first, *SMALL)
    with engine(lab, instance) as running:
        digest = running.digest
        lab.wcache("warm", "--instance", instance, "--model", second, "--keep-old")
        assert parts(lab, instance) == {1: "held", 2: "serving"}
        check_store(lab, instance)
        kill_and_wait(lab, instance)
        assert parts(lab, instance) == {1: "held", 2: "serving"}
        lab.wcache("rollback", "--instance", instance)
        assert report(lab, instance).serving.number == 1  # type: ignore[union-attr]  # it serves
        assert running.digest == digest
        with engine(lab, instance) as again:
            assert again.digest == digest
        # The lower number serves now, and the higher one is held again.
        lab.wcache("warm", "--instance", instance, "--model", second, "--keep-old")
        lab.wcache("rollback", "--instance", instance)
        with engine(lab, instance) as newer:
            lab.wcache("warm", "--instance", instance, "--previous")
            assert newer.digest == digest
            lab.wcache("rollback", "--instance", instance)
            lab.systemctl("restart", daemon(instance))
            kill_and_wait(lab, instance)
            assert report(lab, instance).serving.number == 1  # type: ignore[union-attr]  # it serves
            assert newer.digest == running.digest == digest
    check_store(lab, instance)
    # A reboot brings what was gone back to: the configuration went back too.
    assert first in lab.path(f"/etc/wcache/{instance}.toml").read_text()
    assert lab.wcache("status", "--instance", instance).code == 0


def test_memory_returns_to_one_generation(lab: Lab, instance: str) -> None:
    first, second = model(lab, "first", 1), model(lab, "second", 2)
    before = lab.slabs_held()
    lab.wcache("up", "--instance", instance, "--model", first, *SMALL)
    one = lab.slabs_held() - before
    with engine(lab, instance):
        lab.wcache("warm", "--instance", instance, "--model", second)
        assert lab.slabs_held() - before > one
    wait_for(lambda: parts(lab, instance) == {2: "serving"}, "it is freed", PATIENCE_S)
    wait_for(lambda: lab.slabs_held() - before == one, "the store has dropped it", PATIENCE_S)
