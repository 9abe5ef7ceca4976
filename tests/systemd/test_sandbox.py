"""That the sandbox of the units leaves room for what daemon, loader and engine really do."""

from pathlib import Path

import pytest

from tests.processes import wait_for
from tests.systemd.lab import PYTHON, SOURCE, Lab, daemon, engine, loader
from wcache.config import AccessSection, load_config, save_config
from wcache.state import RankState

pytestmark = pytest.mark.systemd

MODEL = "/srv/models/llama"
SMALL = ("--device", "cpu", "--slab-bytes", "2MiB")
NOBODY = "65534"
PATIENCE_S = 60.0


def up(lab: Lab, instance: str, model: str = MODEL) -> None:
    lab.wcache("up", "--instance", instance, "--model", model, *SMALL)


def open_to_group(lab: Lab, instance: str) -> None:
    file = lab.path(f"/etc/wcache/{instance}.toml")
    config = load_config(file)
    changed = type(config)(
        model=config.model, layout=config.layout, memory=config.memory,
        access=AccessSection(group="wcache"),
    )  # fmt: skip
    save_config(changed, file)


@pytest.fixture
def lab_for_all(lab: Lab) -> Lab:
    """The interpreter may lie in root's home, which others can not enter."""
    lab.run("chmod", "a+x", "/root")
    return lab


def test_members_of_the_group_attach_and_others_do_not(lab_for_all: Lab, instance: str) -> None:
    lab = lab_for_all
    up(lab, instance)
    open_to_group(lab, instance)
    lab.systemctl("reload", daemon(instance))
    group = lab.run("getent", "group", "wcache").stdout.split(":")[2]
    socket = lab.paths(instance).rank(0).socket
    wait_for(lambda: socket.stat().st_gid == int(group), "the socket has the group", PATIENCE_S)
    as_nobody = ("setpriv", "--reuid", NOBODY, "--regid", NOBODY)
    run = {"WCACHE_RUN_DIR": "/run/wcache"}
    member = (*as_nobody, "--groups", group)
    with engine(lab, instance, around=member, variables=run) as theirs:
        assert theirs.lease == "held"
        assert [lease["uid"] for lease in lab.status(instance)["leases"]] == [int(NOBODY)]
    attach = f"import wcache; wcache.attach(instance={instance!r})"
    done = lab.run(*as_nobody, "--clear-groups", "env", f"PYTHONPATH={SOURCE}",
                   "WCACHE_RUN_DIR=/run/wcache", PYTHON, "-c", attach, check=False)  # fmt: skip
    assert "NoPermissionError" in done.stderr


def test_who_may_not_command_systemd_is_told_to_use_sudo(lab_for_all: Lab, instance: str) -> None:
    lab = lab_for_all
    up(lab, instance)
    done = lab.run("setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "env",
                   f"PYTHONPATH={SOURCE}", "WCACHE_RUN_DIR=/run/wcache",
                   "WCACHE_CONFIG_DIR=/etc/wcache", PYTHON, "-P", "-m", "wcache", "down",
                   "--instance", instance, check=False)  # fmt: skip
    assert done.code == 77
    assert "sudo" in done.stderr
    found = lab.report(0, instance)
    assert found is not None
    assert found.serving is not None


def test_a_checkpoint_in_somebodys_home_is_read(lab: Lab, instance: str) -> None:
    home = f"/home/{instance}"
    lab.run("cp", "-r", MODEL, home)
    lab.run("chown", "-R", f"{NOBODY}:{NOBODY}", home)
    lab.run("chmod", "-R", "go-rwx", home)
    up(lab, instance, home)
    assert lab.show(loader(instance), "Result") == {"Result": "success"}


def test_a_checkpoint_in_tmp_is_read(lab: Lab, instance: str) -> None:
    lab.run("cp", "-r", MODEL, f"/tmp/{instance}")
    up(lab, instance, f"/tmp/{instance}")


def test_the_daemon_has_no_network_no_device_and_no_right_but_one(lab: Lab, instance: str) -> None:
    up(lab, instance)
    found = lab.report(0, instance)
    assert found is not None
    status = lab.run("cat", f"/proc/{found.pid}/status").stdout
    bounding = next(line for line in status.splitlines() if line.startswith("CapBnd:"))
    assert int(bounding.split()[1], 16) == 1  # CAP_CHOWN
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    names = lab.run("nsenter", "-t", str(found.pid), "-m", "ls", "/dev").stdout.split()
    assert "null" in names
    assert not any(name.startswith(("nvidia", "tty", "sd")) for name in names if name != "tty")
    own, init = (lab.run("readlink", f"/proc/{pid}/ns/net").stdout for pid in (found.pid, 1))
    assert own != init


def test_the_loader_reads_what_up_was_told_of_the_architecture(lab: Lab, instance: str) -> None:
    """It asks transformers nothing then, which takes it seconds of imports."""
    where = "import importlib.util as u; print(u.find_spec('transformers').origin)"
    package = Path(lab.run(PYTHON, "-c", where).stdout.strip()).parent
    lab.wcache("up", "--instance", instance, "--model", MODEL, *SMALL, "--tp", "3")
    lab.wcache("down", "--instance", instance)
    # It can be found as before, and can not be imported.
    hidden = f"[Service]\nInaccessiblePaths={package}/utils\n"
    with lab.drop_in("wcache-load@.service", hidden):
        lab.systemctl("start", daemon(instance, 1))
        found = lab.report(1, instance)
        assert found is not None
        assert found.serving is not None
        # And it is this that it was spared.
        for path in lab.paths(instance).architecture_folder.iterdir():
            path.unlink()
        lab.systemctl("start", daemon(instance, 2), check=False)
        assert lab.show(daemon(instance, 2), "Result") != {"Result": "success"}


def test_a_daemon_that_is_killed_in_a_load_loads_again(lab: Lab, instance: str) -> None:
    up(lab, instance)
    lab.wcache("down", "--instance", instance)
    lab.systemctl("start", "--no-block", daemon(instance))

    def is_loading() -> bool:
        found = lab.report(0, instance)
        return found is not None and found.state is RankState.LOADING

    wait_for(is_loading, "the load has begun", PATIENCE_S)
    found = lab.report(0, instance)
    assert found is not None
    lab.kill("KILL", found.pid)

    def serves() -> bool:
        now = lab.report(0, instance)
        return now is not None and now.serving is not None and now.pid != found.pid

    wait_for(serves, "it was loaded again", PATIENCE_S)
    wait_for(
        lambda: lab.show(loader(instance), "ActiveState", "Result")
        == {"ActiveState": "inactive", "Result": "success"},
        "the loader ended well", PATIENCE_S,
    )  # fmt: skip


def test_a_loader_that_is_killed_fails_the_first_load_and_up_mends_it(
    lab: Lab, instance: str
) -> None:
    up(lab, instance)
    lab.wcache("down", "--instance", instance)
    lab.systemctl("start", "--no-block", daemon(instance))

    def loading_pid() -> int:
        found = lab.report(0, instance)
        return found.progress.loader_pid if found and found.progress else 0

    wait_for(lambda: loading_pid() > 0, "the load has begun", PATIENCE_S)
    lab.kill("KILL", loading_pid())
    wait_for(
        lambda: lab.show(daemon(instance), "ActiveState", "ExecMainStatus")
        == {"ActiveState": "failed", "ExecMainStatus": "78"},
        "the daemon has failed", PATIENCE_S,
    )  # fmt: skip
    row = lab.status(instance)["ranks"][0]
    assert "ended before it had published" in row["status"]
    lab.wcache("up", "--instance", instance)
    assert lab.status(instance)["ready"]


def test_an_engines_unit_waits_for_its_rank_and_outlives_its_restart(
    lab: Lab, instance: str
) -> None:
    up(lab, instance)
    lab.wcache("down", "--instance", instance)
    unit = f"wcache-engine@{instance}.service"
    folder = f"/run/systemd/system/{unit}.d"
    lab.path(folder).mkdir(parents=True)
    lab.write(
        f"{folder}/engine.conf",
        f"[Unit]\nWants={daemon(instance)}\nAfter={daemon(instance)}\n"
        f"[Service]\nExecStartPre={PYTHON} -P -m wcache status {instance}:0\n"
        "ExecStart=\nExecStart=/bin/sleep infinity\n",
    )
    lab.systemctl("daemon-reload")
    try:
        lab.systemctl("start", unit)
        assert lab.status(instance)["ready"]
        before = lab.show(unit, "MainPID", "ActiveState")
        assert before["ActiveState"] == "active"
        lab.systemctl("restart", daemon(instance))
        assert lab.show(unit, "MainPID", "ActiveState") == before
        # To systemd this is a clean end, as is the 0 of a vLLM that has lost its worker.
        lab.kill("TERM", int(before["MainPID"]))
        wait_for(
            lambda: lab.show(unit, "NRestarts", "ActiveState")
            == {"NRestarts": "1", "ActiveState": "active"},
            "an engine that nobody stopped is started again", PATIENCE_S,
        )  # fmt: skip
    finally:
        lab.systemctl("stop", unit)
        lab.path(f"{folder}/engine.conf").unlink()
        lab.systemctl("daemon-reload")


def test_the_example_engine_says_what_is_to_be_written(lab: Lab) -> None:
    lab.systemctl("start", "wcache-engine@nobody.service", check=False)
    wait_for(
        lambda: lab.show("wcache-engine@nobody.service", "ActiveState", "ExecMainStatus")
        == {"ActiveState": "failed", "ExecMainStatus": "78"},
        "it has failed", PATIENCE_S,
    )  # fmt: skip
    said = lab.journal("wcache-engine@nobody.service")
    assert "systemctl edit wcache-engine@nobody.service" in said
    lab.systemctl("reset-failed", "wcache-engine@nobody.service")
