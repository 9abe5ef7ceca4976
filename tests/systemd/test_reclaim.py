"""Stop then start under systemd: a live engine gives back what nobody else has kept."""

import pytest

from tests.processes import wait_for
from tests.systemd.lab import PYTHON, SOURCE, Engine, Lab, daemon, engine, loader
from wcache.protocol.reports import GenerationReport

pytestmark = pytest.mark.systemd

MODEL = "/srv/models/llama"
SMALL = ("--device", "cpu", "--slab-bytes", "2MiB")
PATIENCE_S = 60.0
PUBLISHES = """
import sys, torch, wcache
torch.manual_seed(0)
wcache.publish(torch.nn.Linear(64, 64), instance=sys.argv[1], model="mine")
"""

# A network, pid and mount namespace and a root of its own, and the rank's folder alone.
CONTAINER = """
folder=/run/wcache/$0
mount -t tmpfs tmpfs /mnt && mkdir -p /mnt/share && mount --bind $folder /mnt/share &&
mount -t tmpfs tmpfs /run && mkdir -p $folder && mount --move /mnt/share $folder &&
umount /mnt && exec "$@"
"""


def serving(lab: Lab, instance: str) -> GenerationReport | None:
    found = lab.report(0, instance)
    return found.serving if found else None


def stop_and_start(lab: Lab, instance: str) -> None:
    """As if nothing was kept, also where systemd is new enough to do it."""
    lab.systemctl("stop", daemon(instance))
    lab.systemctl("clean", "--what=fdstore", daemon(instance), check=False)
    assert lab.stored(instance) == 0
    lab.systemctl("start", daemon(instance))


def came_back(
    lab: Lab, instance: str, before: GenerationReport | None, running: Engine, digest: str
) -> None:
    def is_reclaimed() -> bool:
        found = serving(lab, instance)
        return found is not None and found.how == "reclaimed"

    wait_for(is_reclaimed, "the generation is served again", PATIENCE_S)
    wait_for(lambda: running.lease == "held", "the lease is renewed", PATIENCE_S)
    after = lab.report(0, instance)
    assert after is not None
    assert after.serving is not None
    assert before is not None
    assert after.serving.manifest_digest == before.manifest_digest
    assert after.serving.number == before.number
    assert len(after.leases) == 1
    assert lab.stored(instance) == after.expected_fds > after.serving.slabs
    assert running.digest == digest
    assert lab.show(loader(instance), "Result") == {"Result": "success"}
    with engine(lab, instance) as another:
        assert another.digest == digest


def test_stop_and_start_under_a_live_engine_read_nothing(lab: Lab, instance: str) -> None:
    lab.wcache("up", "--instance", instance, "--model", MODEL, *SMALL)
    before = serving(lab, instance)
    weights = lab.models / "llama" / "model.safetensors"
    with engine(lab, instance) as running:
        digest = running.digest
        hidden = weights.rename(lab.models / "hidden")
        try:
            stop_and_start(lab, instance)
            came_back(lab, instance, before, running, digest)
            # Reclaimed weights are adopted like any others.
            lab.systemctl("restart", daemon(instance))
            found = serving(lab, instance)
            assert found is not None
            assert found.how == "adopted"
            assert running.digest == digest
        finally:
            hidden.rename(weights)
    assert "nothing read from disk" in lab.journal(daemon(instance))


def test_an_engine_in_a_container_gives_back_through_the_folder_that_it_shares(
    lab: Lab, instance: str
) -> None:
    lab.wcache("up", "--instance", instance, "--model", MODEL, *SMALL)
    before = serving(lab, instance)
    around = ("unshare", "--pid", "--fork", "--kill-child", "--ipc", "--net", "--uts", "--mount",
              "--propagation", "private", "bash", "-c", CONTAINER, f"{instance}:0")  # fmt: skip
    with engine(lab, instance, around=around) as inside:
        digest = inside.digest
        stop_and_start(lab, instance)
        came_back(lab, instance, before, inside, digest)


def test_what_an_engine_published_comes_back_without_any_checkpoint(
    lab: Lab, instance: str
) -> None:
    lab.wcache("up", "--instance", instance, "--model", "mine", "--loader", "publish", *SMALL)
    lab.run("env", f"PYTHONPATH={SOURCE}", PYTHON, "-P", "-c", PUBLISHES, instance)
    before = serving(lab, instance)
    with engine(lab, instance) as running:
        digest = running.digest
        stop_and_start(lab, instance)
        came_back(lab, instance, before, running, digest)


def test_the_record_is_of_no_use_once_the_engine_has_ended(lab: Lab, instance: str) -> None:
    lab.wcache("up", "--instance", instance, "--model", MODEL, *SMALL)
    with engine(lab, instance) as running:
        assert running.lease == "held"
        lab.systemctl("stop", daemon(instance))
    record = lab.paths(instance).rank(0).served_file
    assert record.exists()
    lab.systemctl("clean", "--what=fdstore", daemon(instance), check=False)
    lab.systemctl("start", daemon(instance))
    found = serving(lab, instance)
    assert found is not None
    assert found.how == "loaded"
    assert "engines that have it mapped may live" not in lab.journal(daemon(instance))
