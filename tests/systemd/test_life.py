"""A rank's life under systemd: stopped, failed, rebooted, misconfigured, masked, logged."""

import contextlib
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from tests.checkpoints import write_checkpoint
from tests.processes import wait_for
from tests.systemd.conftest import write_model
from tests.systemd.lab import Done, Lab, daemon, engine, loader
from wcache.errors import NoSuchRankError

pytestmark = pytest.mark.systemd

MODEL = "/srv/models/llama"
SMALL = ("--device", "cpu", "--slab-bytes", "2MiB")
PATIENCE_S = 60.0


def up(lab: Lab, instance: str, *options: str) -> None:
    lab.wcache("up", "--instance", instance, "--model", MODEL, *SMALL, *options)


def serves(lab: Lab, instance: str, rank: int = 0) -> bool:
    found = lab.report(rank, instance)
    return found is not None and found.serving is not None


def keeps_descriptors_over_stop(lab: Lab) -> bool:
    """systemd 254 and newer, for which install has put a drop-in beside the unit."""
    return lab.path("/usr/local/lib/systemd/system/wcache@.service.d/preserve.conf").exists()


def test_stop_frees_the_memory_and_start_loads_again(lab: Lab, instance: str) -> None:
    before = lab.slabs_held()
    up(lab, instance)
    assert lab.slabs_held() > before
    lab.systemctl("stop", daemon(instance))
    kept = keeps_descriptors_over_stop(lab)
    assert (lab.slabs_held() > before) == kept
    assert (lab.stored(instance) > 0) == kept
    lab.systemctl("start", daemon(instance))
    found = lab.report(0, instance)
    assert found is not None
    assert found.serving is not None
    assert found.serving.how == ("adopted" if kept else "loaded")


def test_down_frees_the_memory_whatever_systemd_keeps(lab: Lab, instance: str) -> None:
    before = lab.slabs_held()
    up(lab, instance)
    done = lab.wcache("down", "--instance", instance)
    assert "freed" in done.stderr
    assert lab.slabs_held() == before
    assert lab.stored(instance) == 0
    assert lab.status(instance)["ranks"][0]["state"] == "down"
    # A reboot brings it back, until it is told not to.
    assert lab.systemctl("is-enabled", daemon(instance)) == "enabled\n"
    lab.wcache("down", "--instance", instance, "--disable")
    assert lab.systemctl("is-enabled", daemon(instance), check=False) == "disabled\n"


def test_an_engine_keeps_what_it_has_mapped_over_a_stop(lab: Lab, instance: str) -> None:
    up(lab, instance)
    with engine(lab, instance) as running:
        digest = running.digest
        lab.systemctl("stop", daemon(instance))
        assert running.digest == digest
        lab.systemctl("start", daemon(instance))
        assert running.digest == digest


def test_a_failed_load_fails_its_unit_alone_and_says_why(lab: Lab, instance: str) -> None:
    up(lab, instance, "--dp", "2")
    lab.wcache("down", "--instance", instance, "1")
    before = lab.report(0, instance)
    weights = lab.models / "llama" / "model.safetensors"
    hidden = weights.rename(lab.models / "hidden")
    try:
        lab.systemctl("start", daemon(instance, 1), check=False)
    finally:
        hidden.rename(weights)
    for unit in (daemon(instance, 1), loader(instance, 1)):
        shown = lab.show(unit, "ActiveState", "Result", "ExecMainStatus")
        assert shown == {"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "78"}
    row = lab.status(instance)["ranks"][1]
    assert row["state"] == "failed"
    assert "load failed: " in row["status"]
    assert "safetensors" in row["status"]
    said = lab.wcache("logs", "--instance", instance, f"{instance}:1").stdout
    assert "ERROR load failed: " in said
    assert lab.report(0, instance) == before
    # It is mended by what the hint says, and nothing else.
    lab.wcache("up", "--instance", instance)
    assert serves(lab, instance, 1)


def test_a_broken_configuration_frees_nothing(lab: Lab, instance: str) -> None:
    up(lab, instance)
    before = lab.report(0, instance)
    assert before is not None
    assert before.serving is not None
    lab.write(f"/etc/wcache/{instance}.toml", "[model]\npath = 1\n")
    lab.systemctl("restart", daemon(instance))
    now = lab.report(0, instance)
    assert now is not None
    assert now.serving is not None
    assert now.pid != before.pid
    assert now.serving.manifest_digest == before.serving.manifest_digest
    assert now.serving.how == "adopted"
    assert any("model.path" in problem for problem in now.problems)
    status = lab.wcache("status", "--instance", instance, check=False)
    assert status.code == 78
    assert "model.path" in status.stderr
    assert "model.path" in lab.journal(daemon(instance))
    assert "problem" in lab.show(daemon(instance), "StatusText")["StatusText"]


def test_without_a_configuration_the_unit_fails_at_once(lab: Lab, instance: str) -> None:
    lab.systemctl("start", daemon(instance), check=False)
    assert lab.show(daemon(instance), "ActiveState", "ExecMainStatus", "NRestarts") == {
        "ActiveState": "failed", "ExecMainStatus": "78", "NRestarts": "0",
    }  # fmt: skip
    assert f"{instance}.toml" in lab.journal(daemon(instance))
    lab.systemctl("reset-failed", daemon(instance), loader(instance), check=False)


def test_a_restart_does_not_wait_for_a_loader_that_hangs(lab: Lab, instance: str) -> None:
    up(lab, instance)
    before = lab.report(0, instance)
    assert before is not None
    folder = f"/run/systemd/system/{loader(instance)}.d"
    lab.path(folder).mkdir(parents=True)
    lab.write(f"{folder}/hang.conf", "[Service]\nExecStart=\nExecStart=/bin/sleep infinity\n")
    lab.systemctl("daemon-reload")
    try:
        lab.systemctl("start", loader(instance))
        lab.systemctl("restart", daemon(instance))
        assert lab.show(loader(instance), "ActiveState") == {"ActiveState": "active"}
        now = lab.report(0, instance)
        assert now is not None
        assert now.pid != before.pid
        assert now.serving is not None
        # Down ends it as well.
        lab.wcache("down", "--instance", instance)
        assert lab.show(loader(instance), "ActiveState") == {"ActiveState": "inactive"}
    finally:
        lab.path(f"{folder}/hang.conf").unlink()
        lab.systemctl("daemon-reload")


@pytest.fixture(scope="module")
def large(lab: Lab) -> str:
    """A checkpoint whose load can be met; the lab and all that is in it is temporary."""
    tensors = {
        f"layer.{index}.weight": torch.full((4096, 4096), float(index), dtype=torch.bfloat16)
        for index in range(16)
    }
    folder = write_checkpoint(lab.models / "large", tensors)
    (folder / "model.safetensors").chmod(0o644)
    return "/srv/models/large"


def reads(lab: Lab, instance: str) -> bool:
    """The rank's loader is at it."""
    with contextlib.suppress(NoSuchRankError):
        found = lab.report(0, instance)
        progress = found.progress if found else None
        return progress is not None and progress.phase == "read" and progress.done_bytes > 0
    return False


@contextlib.contextmanager
def up_until_it_reads(lab: Lab, instance: str, model: str) -> "Iterator[Future[Done]]":
    """``wcache up``, which is waited for at the end."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            lambda: lab.wcache(
                "up", "--instance", instance, "--model", model, "--device", "cpu", check=False
            )
        )
        wait_for(lambda: reads(lab, instance), "the load is under way", PATIENCE_S)
        yield running


def test_stop_in_the_midst_of_a_load_ends_the_loader_and_frees_its_memory(
    lab: Lab, instance: str, large: str
) -> None:
    before = lab.slabs_held()
    with up_until_it_reads(lab, instance, large) as running:
        assert lab.slabs_held() > before
        lab.systemctl("stop", daemon(instance))
        assert lab.slabs_held() == before
        assert running.result(PATIENCE_S).code != 0
    # Both ended when they were asked to; after a kill for want of it this would be "timeout".
    for unit in (daemon(instance), loader(instance)):
        shown = lab.show(unit, "ActiveState", "Result", "MainPID")
        assert shown == {"ActiveState": "inactive", "Result": "success", "MainPID": "0"}
    assert lab.stored(instance) == 0
    lab.systemctl("start", daemon(instance))
    found = lab.report(0, instance)
    assert found is not None
    assert found.serving is not None
    assert found.serving.how == "loaded"
    lab.wcache("verify", "--instance", instance)


def test_stopping_the_loader_alone_leaves_what_is_served(
    lab: Lab, instance: str, large: str
) -> None:
    up(lab, instance)
    before, slabs = lab.report(0, instance), lab.slabs_held()
    assert before is not None
    with up_until_it_reads(lab, instance, large) as running:
        assert lab.slabs_held() > slabs
        lab.systemctl("stop", loader(instance))
        done = running.result(PATIENCE_S)
    assert (done.code, "ended before it had published" in done.stderr) == (1, True)
    assert lab.slabs_held() == slabs
    assert lab.show(loader(instance), "ActiveState", "Result") == {
        "ActiveState": "inactive", "Result": "success",
    }  # fmt: skip
    after = lab.report(0, instance)
    assert after is not None
    assert (after.pid, after.generations) == (before.pid, before.generations)
    lab.wcache("up", "--instance", instance)
    now = lab.report(0, instance)
    assert now is not None
    assert now.serving is not None
    assert now.serving.number == 2
    lab.wcache("verify", "--instance", instance)


def test_another_model_is_loaded_beside_the_old_one(lab: Lab, instance: str) -> None:
    up(lab, instance)
    lab.wcache("up", "--instance", instance, "--model", MODEL, *SMALL, "--dtype", "float32")
    found = lab.report(0, instance)
    assert found is not None
    assert found.serving is not None
    assert found.serving.number == 2
    assert len(found.generations) == 1
    assert lab.stored(instance) == found.expected_fds


def test_up_goes_on_where_ranks_can_not_be_enabled(lab: Lab, instance: str) -> None:
    # As on a machine whose /etc can not be written: the link's name is taken.
    link = lab.path(f"/etc/systemd/system/wcache.target.wants/{daemon(instance)}")
    link.mkdir(parents=True)
    try:
        done = lab.wcache("up", "--instance", instance, "--model", MODEL, *SMALL)
        assert "warning: a reboot will not load them again: " in done.stderr
        assert serves(lab, instance)
    finally:
        link.rmdir()


def test_a_masked_unit_is_named(lab: Lab, instance: str) -> None:
    lab.systemctl("mask", daemon(instance))
    try:
        done = lab.wcache("up", "--instance", instance, "--model", MODEL, *SMALL, check=False)
        assert done.code == 1
        assert f"error: {daemon(instance)} is masked\n" in done.stderr
        assert f"hint: systemctl unmask {daemon(instance)}\n" in done.stderr
    finally:
        lab.systemctl("unmask", daemon(instance))


def test_the_journal_is_shown_by_part(lab: Lab, instance: str) -> None:
    up(lab, instance)
    both = lab.wcache("logs", "--instance", instance).stdout.splitlines()
    parts = {line.partition("[")[0] for line in both}
    assert parts == {"daemon", "loader", "systemd"}
    times = [line.partition(" | ")[2][:23] for line in both]
    assert times == sorted(times)
    only = lab.wcache("logs", "--instance", instance, "--loader", "-n", "1").stdout.splitlines()
    assert len(only) == 1
    assert "INFO published generation 1" in only[0]
    assert only[0].startswith(f"loader[{instance}:0] ")


def test_status_names_what_is_kept_and_who_uses_it(lab: Lab, instance: str) -> None:
    up(lab, instance)
    with engine(lab, instance) as running:
        status = lab.status(instance)
        row = status["ranks"][0]
        assert status["supervisor"] == "systemd"
        assert row["stored_fds"] == row["expected_fds"] > 8
        assert row["pid"] == int(lab.show(daemon(instance), "MainPID")["MainPID"])
        assert [lease["pid"] for lease in status["leases"]] == [running.pid]


@pytest.fixture
def machine() -> Iterator[Lab]:
    """A lab that may be rebooted."""
    made = Lab()
    try:
        write_model(made)
        made.up()
        made.install()
        yield made
    finally:
        made.close()


def test_a_reboot_loads_the_same_weights_without_a_command(machine: Lab) -> None:
    machine.wcache("up", "--model", MODEL, *SMALL, "--tp", "3")
    digests = [machine.report(rank) for rank in range(3)]
    machine.wcache("down", "2", "--disable")
    machine.down("--clean")
    machine.up()
    wait_for(lambda: serves(machine, "") and serves(machine, "", 1), "weights", PATIENCE_S)
    for rank in (0, 1):
        before, now = digests[rank], machine.report(rank)
        assert before is not None
        assert now is not None
        assert before.serving is not None
        assert now.serving is not None
        assert now.serving.how == "loaded"
        assert now.serving.fingerprint_digest == before.serving.fingerprint_digest
    assert machine.report(2) is None


def test_the_folder_of_the_socket_is_all_that_a_container_needs(lab: Lab, instance: str) -> None:
    """Pid, ipc, network, mount, uts and user namespaces of its own, and another root's /run."""
    up(lab, instance)
    folder = f"/run/wcache/{instance}:0"
    script = (
        "mount -t tmpfs tmpfs /mnt && mkdir -p /mnt/share &&"
        f" mount --bind {folder} /mnt/share && mount -t tmpfs tmpfs /run &&"
        f" mkdir -p {folder} && mount --move /mnt/share {folder} && umount /mnt &&"
        ' ls /run/wcache >&2 && exec "$@"'
    )
    around = (
        "unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--ipc",
        "--net", "--uts", "--mount", "--propagation", "private", "bash", "-c",
        script, "-",
    )  # fmt: skip
    with engine(lab, instance) as outside, engine(lab, instance, around=around) as inside:
        assert inside.pid < outside.pid
        assert inside.digest == outside.digest
        leases = {lease["pid"] for lease in lab.status(instance)["leases"]}
        assert outside.pid in leases
        (theirs,) = leases - {outside.pid}
        # The number is one that the host knows.
        words = lab.run("cat", f"/proc/{theirs}/cmdline").stdout
        assert "tests.systemd.engine" in words
        namespace = ["readlink", f"/proc/{theirs}/ns/net"]
        assert lab.run(*namespace).stdout != lab.run("readlink", "/proc/1/ns/net").stdout
        digest = inside.digest
        lab.systemctl("restart", daemon(instance))
        wait_for(lambda: inside.lease == "held", "the lease is renewed", PATIENCE_S)
        assert inside.digest == digest
        wait_for(lambda: len(lab.status(instance)["leases"]) == 2, "both have theirs", PATIENCE_S)


def test_two_labs_run_side_by_side(lab: Lab) -> None:
    other = Lab()
    try:
        other.up()
        assert other.pid != lab.pid
        other.down()
        assert lab.systemctl("is-active", "multi-user.target") == "active\n"
        with pytest.raises(AssertionError, match="no lab is up"):
            other.run("true")
    finally:
        other.close()


def test_a_lab_ends_with_its_owner(lab: Lab) -> None:
    owner = subprocess.Popen(["sleep", "infinity"])
    other = Lab()
    try:
        other._script("up", "-o", str(owner.pid))
        assert other._script("pid").code == 0
        owner.kill()
        owner.wait()
        wait_for(lambda: other._script("pid", check=False).code == 1, "it ends", PATIENCE_S)
    finally:
        owner.kill()
        owner.wait()
        other.close()
