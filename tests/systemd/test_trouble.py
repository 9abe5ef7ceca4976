"""What an operator or a distribution does wrong under systemd: each said, with what mends it."""

import json
from collections.abc import Iterator

import pytest

from tests.processes import wait_for
from tests.systemd.lab import PYTHON, SOURCE, Done, Lab, daemon, engine, loader
from wcache.protocol.messages import Report

pytestmark = pytest.mark.systemd

MODEL = "/srv/models/llama"
SMALL = ("--device", "cpu", "--slab-bytes", "2MiB")
PATIENCE_S = 60.0
NOBODY = 65534


def up(lab: Lab, instance: str, *options: str, check: bool = True) -> Done:
    return lab.wcache("up", "--instance", instance, "--model", MODEL, *SMALL, *options, check=check)


def serving(lab: Lab, instance: str) -> Report:
    found = lab.report(0, instance)
    assert found is not None
    assert found.serving is not None
    return found


def problems(lab: Lab, instance: str) -> str:
    return lab.wcache("status", "--instance", instance, check=False).stderr


def test_a_restart_of_a_masked_unit_is_refused_and_frees_nothing(lab: Lab, instance: str) -> None:
    up(lab, instance)
    before = serving(lab, instance)
    lab.systemctl("mask", "--runtime", daemon(instance))
    try:
        done = lab.wcache("restart", "--instance", instance, check=False)
        assert done.code == 1
        assert f"error: {daemon(instance)} is masked\n" in done.stderr
        assert f"hint: systemctl unmask {daemon(instance)}\n" in done.stderr
        assert serving(lab, instance).pid == before.pid
        assert f"{daemon(instance)} is masked: systemctl unmask" in problems(lab, instance)
    finally:
        lab.systemctl("unmask", "--runtime", daemon(instance))
    assert "is masked" not in problems(lab, instance)
    # systemd has dropped the store of a unit without settings; what serves it has all to be stored.
    if lab.stored(instance) == 0:
        assert f"keeps 0 of {before.expected_fds} descriptors" in problems(lab, instance)
    done = lab.wcache("restart", "--instance", instance)
    assert "adopted generation 1" in done.stderr
    assert lab.stored(instance) == before.expected_fds


def test_a_store_that_is_too_small_is_found_and_can_be_mended(lab: Lab, instance: str) -> None:
    with lab.drop_in(daemon(instance), "[Service]\nFileDescriptorStoreMax=2\n"):
        done = up(lab, instance)
        before = serving(lab, instance)
        words = f"the supervisor keeps 2 of {before.expected_fds} descriptors"
        mend = f"set FileDescriptorStoreMax={before.expected_fds} or more, it is 2"
        assert words in done.stderr
        assert mend in done.stderr
        status = lab.wcache("status", "--instance", instance, check=False)
        assert status.code == 1
        assert words in status.stderr
        doctor = lab.wcache("doctor", "--instance", instance, "--json", check=False)
        found = json.loads(doctor.stdout)["findings"]
        (finding,) = (one for one in found if one["check"] == "descriptors")
        assert finding["result"] == "fail"
        assert mend in finding["mend"]
        refused = lab.wcache("restart", "--instance", instance, check=False)
        assert refused.code == 1
        assert "would lose its weights" in refused.stderr
        assert mend in refused.stderr
        assert serving(lab, instance).pid == before.pid
    # Larger now, as the advice was: nothing was lost meanwhile.
    done = lab.wcache("restart", "--instance", instance)
    assert "adopted generation 1" in done.stderr
    now = serving(lab, instance)
    assert now.pid != before.pid
    assert lab.stored(instance) == now.expected_fds


def test_a_rank_in_its_start_limit_is_said_and_started_by_command(lab: Lab, instance: str) -> None:
    limit = "[Unit]\nStartLimitIntervalSec=1h\nStartLimitBurst=2\n"
    with lab.drop_in(daemon(instance), limit):
        up(lab, instance)
        for _ in range(3):  # up has reloaded systemd when it enabled the rank, and so the count
            lab.systemctl("restart", daemon(instance), check=False)
        assert lab.show(daemon(instance), "Result") == {"Result": "start-limit-hit"}
        status = lab.wcache("status", "--instance", instance, check=False)
        assert status.code == 3
        assert "was started too often" in status.stderr
        assert f"systemctl reset-failed {daemon(instance)}" in status.stderr
        lab.wcache("up", "--instance", instance)
        assert serving(lab, instance).problems == ()
        assert "too often" not in problems(lab, instance)


def edit_dtype(lab: Lab, instance: str) -> None:
    file = f"/etc/wcache/{instance}.toml"
    text = lab.path(file).read_text()
    assert 'dtype = "auto"' in text
    lab.write(file, text.replace('dtype = "auto"', 'dtype = "float32"'))


def test_a_changed_configuration_is_asked_about_by_wcache_restart(lab: Lab, instance: str) -> None:
    up(lab, instance)
    before = serving(lab, instance)
    edit_dtype(lab, instance)
    refused = lab.wcache("restart", "--instance", instance, check=False)
    assert refused.code == 2
    assert "rank 0: dtype: cached auto, wanted float32" in refused.stderr
    assert serving(lab, instance).pid == before.pid
    status = lab.wcache("status", "--instance", instance, check=False)
    assert status.code == 5
    assert "serves other weights than the configuration wants: dtype" in status.stderr
    done = lab.wcache("restart", "--instance", instance, "--yes")
    assert "adopted generation 1" in done.stderr
    now = serving(lab, instance)
    assert now.serving is not None
    assert (now.serving.number, now.serving.fingerprint.dtype) == (2, "float32")
    assert lab.wcache("status", "--instance", instance).code == 0


def test_systemctl_restart_over_a_changed_configuration_keeps_the_weights(
    lab: Lab, instance: str
) -> None:
    """systemctl can not ask: other weights are loaded when wcache warm is told to."""
    up(lab, instance)
    before = serving(lab, instance)
    with engine(lab, instance) as running:
        digest = running.digest
        edit_dtype(lab, instance)
        lab.systemctl("restart", daemon(instance))
        wait_for(
            lambda: lab.show(loader(instance), "ActiveState") == {"ActiveState": "inactive"},
            "the loader has ended", PATIENCE_S,
        )  # fmt: skip
        assert "wcache warm loads what it wants" in lab.journal(loader(instance))
        now = serving(lab, instance)
        assert now.pid != before.pid
        assert now.serving is not None
        assert before.serving is not None
        assert now.serving.manifest_digest == before.serving.manifest_digest
        status = lab.wcache("status", "--instance", instance, check=False)
        assert status.code == 5
        assert "dtype: cached auto, wanted float32" in status.stderr
        lab.wcache("warm", "--instance", instance)
        assert serving(lab, instance).serving.number == 2  # type: ignore[union-attr]  # serving() has looked
        assert running.digest == digest


def test_without_permission_it_is_77_and_the_line_for_sudo(lab: Lab, instance: str) -> None:
    up(lab, instance)
    lab.run("chmod", "a+x", "/root")  # the interpreter may lie there
    as_nobody = (
        "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "env", "HOME=/tmp",
        "WCACHE_RUN_DIR=/run/wcache", "WCACHE_CONFIG_DIR=/etc/wcache", f"PYTHONPATH={SOURCE}",
        PYTHON, "-P", "-m", "wcache",
    )  # fmt: skip
    for words in (("status",), ("restart",), ("down",)):
        done = lab.run(*as_nobody, *words, "--instance", instance, check=False)
        assert done.code == 77, str(done)
        assert "Traceback" not in done.stderr
        assert (
            "hint: as root: sudo WCACHE_RUN_DIR=/run/wcache WCACHE_CONFIG_DIR=/etc/wcache"
            f" {PYTHON} -P -m wcache {words[0]} --instance {instance}\n"
        ) in done.stderr
    done = lab.run(*as_nobody, "install", check=False)
    assert done.code == 77, str(done)
    assert "wcache install\n" in done.stderr
    assert serving(lab, instance).leases == ()


def test_the_journal_is_printed_as_objects(lab: Lab, instance: str) -> None:
    up(lab, instance)
    text = lab.wcache("logs", "--instance", instance, "--json").stdout
    found = [json.loads(line) for line in text.splitlines()]
    assert {one["part"] for one in found} == {"daemon", "loader", "systemd"}
    assert {(one["instance"], one["rank"]) for one in found} == {(instance, 0)}
    invocation = lab.show(daemon(instance), "InvocationID")["InvocationID"]
    mine = [one for one in found if one["unit"] == daemon(instance) and one["part"] == "daemon"]
    assert {one["invocation"] for one in mine} == {invocation}
    assert {one["pid"] for one in mine} == {serving(lab, instance).pid}
    started = [one for one in found if one["part"] == "systemd"]
    assert invocation in {one["invocation"] for one in started}
    assert {one["pid"] for one in started} == {1}
    assert [one["time"] for one in found] == sorted(one["time"] for one in found)
    last = lab.wcache("logs", f"{instance}:0", "--loader", "-n", "1", "--json").stdout
    assert json.loads(last)["message"].startswith("published generation 1")


@pytest.fixture
def own_supervisor(lab: Lab, instance: str) -> Iterator[int]:
    """wcache's own supervisor, started by somebody before there were units; its pid."""
    unit = "somebodys-terminal.service"
    lab.run(
        "systemd-run", "--quiet", f"--unit={unit}", "--property=KillMode=process",
        f"--setenv=PYTHONPATH={SOURCE}", PYTHON, "-P", "-m", "wcache.supervise", "--empty",
        instance,
    )  # fmt: skip
    try:
        socket = lab.paths(instance).supervisor_socket
        wait_for(socket.exists, "the supervisor listens", PATIENCE_S)
        yield int(lab.show(unit, "MainPID")["MainPID"])
    finally:
        lab.systemctl("stop", daemon(instance), check=False)
        lab.wcache("down", "--instance", instance, "--force", check=False)
        lab.systemctl("stop", unit, check=False)
        lab.systemctl("reset-failed", unit, check=False)


def test_a_rank_that_a_killed_supervisor_left_is_taken_over_by_one_of_its_kind(
    lab: Lab, instance: str, own_supervisor: int
) -> None:
    up(lab, instance)
    assert lab.status(instance)["supervisor"] == "direct"
    before = serving(lab, instance)
    lab.kill("KILL", own_supervisor)
    told = lab.wcache("status", "--instance", instance, check=False)
    assert told.code == 1
    assert "no supervisor keeps its descriptors" in told.stderr
    up_again = f"wcache up --instance {instance} starts one that takes the rank over"
    assert up_again in told.stderr
    lab.wcache("up", "--instance", instance)
    assert serving(lab, instance).pid == before.pid
    assert lab.wcache("status", "--instance", instance).code == 0
    # Down ends that supervisor too, and the next up is systemd's.
    lab.wcache("down", "--instance", instance)
    lab.wcache("up", "--instance", instance)
    assert lab.status(instance)["supervisor"] == "systemd"


@pytest.mark.usefixtures("own_supervisor")
def test_ranks_that_no_boot_starts_are_told_of_until_systemd_has_them(
    lab: Lab, instance: str
) -> None:
    up(lab, instance)
    assert "no boot starts that one" in lab.wcache("up", "--instance", instance).stderr
    aside = lab.wcache("doctor", "--instance", instance)
    assert "kept by wcache's own supervisor, which no boot starts" in aside.stdout
    lab.wcache("down", "--instance", instance)
    assert "systemd is not asked" not in lab.wcache("up", "--instance", instance).stderr
    assert "a reboot loads the same weights again" in (
        lab.wcache("doctor", "--instance", instance).stdout
    )
    lab.systemctl("disable", daemon(instance))
    off = lab.wcache("doctor", "--instance", instance).stdout
    assert f"wcache up --instance {instance} enables it" in off
    lab.wcache("up", "--instance", instance)
    assert "enables it" not in lab.wcache("doctor", "--instance", instance).stdout


def test_a_unit_that_was_started_beside_such_a_rank_is_told_of(
    lab: Lab, instance: str, own_supervisor: int
) -> None:
    up(lab, instance)
    before = serving(lab, instance)
    lab.kill("KILL", own_supervisor)
    lab.systemctl("start", "--no-block", daemon(instance))
    wait_for(
        lambda: lab.show(daemon(instance), "SubState") == {"SubState": "auto-restart"},
        "the unit is tried again", PATIENCE_S,
    )  # fmt: skip
    assert serving(lab, instance).pid == before.pid
    done = lab.wcache("doctor", "--instance", instance, check=False)
    assert f"{daemon(instance)} can not start: a daemon of wcache's own supervisor" in done.stdout
    ends = f"wcache down --instance {instance} ends it, and the unit then loads the weights"
    assert ends in done.stdout
    lab.wcache("down", "--instance", instance)
    wait_for(lambda: lab.status(instance)["ready"], "the unit has loaded the weights", PATIENCE_S)
    assert lab.status(instance)["supervisor"] == "systemd"
    assert lab.wcache("status", "--instance", instance).code == 0
