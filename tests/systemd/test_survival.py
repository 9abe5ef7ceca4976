"""What weights outlive under systemd, while the checkpoint that they came from is not there."""

from collections.abc import Callable, Iterator

import pytest

from tests.processes import wait_for
from tests.systemd.lab import Engine, Lab, daemon, engine, loader
from wcache.protocol.messages import Report

pytestmark = pytest.mark.systemd

INSTANCE = "survival"
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def serving(lab: Lab) -> Iterator[Engine]:
    """Two ranks whose checkpoint is gone, and an engine on the first."""
    lab.wcache("up", "--instance", INSTANCE, "--model", "/srv/models/llama", "--dp", "2",
               "--device", "cpu", "--slab-bytes", "2MiB")  # fmt: skip
    weights = lab.models / "llama" / "model.safetensors"
    hidden = weights.rename(lab.models / "hidden")
    try:
        with engine(lab, INSTANCE) as made:
            yield made
    finally:
        hidden.rename(weights)
        lab.wcache("down", "--instance", INSTANCE, "--force", "--disable")


def report(lab: Lab, rank: int = 0) -> Report:
    found = lab.report(rank, INSTANCE)
    assert found is not None
    return found


def systemctl(*arguments: str) -> Callable[[Lab], object]:
    return lambda lab: lab.systemctl(*arguments)


def signalled(number: str) -> Callable[[Lab], object]:
    return lambda lab: lab.kill(number, report(lab).pid)


def upgraded(lab: Lab) -> None:
    lab.put_source()
    lab.wcache("install")
    lab.wcache("restart", "--instance", INSTANCE)


EVENTS: dict[str, tuple[Callable[[Lab], object], set[int]]] = {
    "systemctl restart of one rank": (systemctl("restart", daemon(INSTANCE)), {0}),
    "wcache restart of all": (lambda lab: lab.wcache("restart", "--instance", INSTANCE), {0, 1}),
    "SIGKILL": (signalled("KILL"), {0}),
    "SIGTERM that nobody's command sent": (signalled("TERM"), {0}),
    "SIGSTOP, and so the watchdog": (signalled("STOP"), {0}),
    "daemon-reload": (systemctl("daemon-reload"), set()),
    "daemon-reexec": (systemctl("daemon-reexec"), set()),
    "SIGKILL after daemon-reexec": (signalled("KILL"), {0}),
    "restart of the target": (systemctl("restart", "wcache.target"), {0, 1}),
    "upgrade of the package": (upgraded, {0, 1}),
}


@pytest.mark.parametrize("name", EVENTS)
def test_weights_outlive(name: str, lab: Lab, serving: Engine) -> None:
    event, restarted = EVENTS[name]
    before = {rank: report(lab, rank) for rank in (0, 1)}
    digest = serving.digest
    event(lab)

    def is_back(rank: int) -> bool:
        found = lab.report(rank, INSTANCE)
        same = found is not None and found.pid == before[rank].pid
        return found is not None and found.serving is not None and same != (rank in restarted)

    for rank, old in before.items():
        wait_for(lambda rank=rank: is_back(rank), f"rank {rank} serves", PATIENCE_S)  # type: ignore[misc]  # mypy has no type for a lambda with a default
        now = report(lab, rank)
        assert old.serving is not None
        assert now.serving is not None
        assert now.serving.manifest_digest == old.serving.manifest_digest
        assert now.serving.how == ("adopted" if rank in restarted else old.serving.how)
        assert lab.stored(INSTANCE, rank) == now.expected_fds > now.serving.slabs
        checkpoint = (lab.models / "hidden").stat().st_size
        assert lab.bytes_read(now.pid) < checkpoint

    wait_for(lambda: serving.lease == "held", "the lease is renewed", PATIENCE_S)
    assert serving.digest == digest
    assert [lease.pid for lease in report(lab).leases] == [serving.pid]
    # A new engine maps the same bytes.
    with engine(lab, INSTANCE) as another:
        assert another.digest == digest


def test_the_loader_that_a_restart_starts_finds_nothing_to_load(lab: Lab, serving: Engine) -> None:
    lab.systemctl("restart", daemon(INSTANCE, 1))

    def has_ended() -> bool:
        return lab.show(loader(INSTANCE, 1), "ActiveState") == {"ActiveState": "inactive"}

    wait_for(has_ended, "the loader has ended", PATIENCE_S)
    assert lab.show(loader(INSTANCE, 1), "Result", "ExecMainStatus") == {
        "Result": "success", "ExecMainStatus": "0",
    }  # fmt: skip
    assert f"rank {INSTANCE}:1 holds generation 1 already" in lab.journal(loader(INSTANCE, 1))


def test_the_folder_that_a_container_has_is_the_same_after_a_restart(
    lab: Lab, serving: Engine
) -> None:
    folder = lab.paths(INSTANCE).rank(0).folder
    inode = folder.stat().st_ino
    lab.systemctl("restart", daemon(INSTANCE))
    assert folder.stat().st_ino == inode
    assert (folder / "rank.ready").exists()


def test_no_ready_file_is_left_by_a_daemon_that_was_killed(lab: Lab, serving: Engine) -> None:
    ready = lab.paths(INSTANCE).rank(0).ready_file
    before = report(lab).pid
    lab.kill("KILL", before)
    wait_for(lambda: not ready.exists(), "the ready file is removed", PATIENCE_S)
    wait_for(ready.exists, "the daemon is ready again", PATIENCE_S)
    assert report(lab).pid != before
