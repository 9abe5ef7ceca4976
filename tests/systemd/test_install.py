"""``wcache install`` and ``doctor`` where a real systemd reads what was installed."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import wait_for
from tests.systemd.lab import Lab
from wcache.install import Target, plan

pytestmark = pytest.mark.systemd

UNITS = "/usr/local/lib/systemd/system"
NOBODY = 65534
HOME = "/run/nobody"


def findings(lab: Lab, check: str) -> dict[str, str]:
    """What doctor says of one check, by result."""
    found = json.loads(lab.wcache("doctor", "--json", check=False).stdout)["findings"]
    return {one["result"]: f"{one['detail']} | {one['mend']}" for one in found
            if one["check"] == check}  # fmt: skip


def test_systemd_reads_the_units_from_where_install_puts_them(lab: Lab) -> None:
    shown = lab.show("wcache@0.service", "FragmentPath", "NeedDaemonReload", "LoadState")
    assert shown == {
        "FragmentPath": f"{UNITS}/wcache@.service",
        "NeedDaemonReload": "no",
        "LoadState": "loaded",
    }


def test_group_and_folders_are_there_at_once(lab: Lab) -> None:
    assert lab.run("getent", "group", "wcache").stdout.startswith("wcache:")
    assert lab.path("/run/wcache").is_dir()


def test_a_second_install_changes_nothing(lab: Lab) -> None:
    done = lab.wcache("install")
    assert {line.split()[0] for line in done.stdout.splitlines()} == {"unchanged"}


def test_doctor_knows_systemd_its_units_and_the_group(lab: Lab) -> None:
    for check in ("systemd", "units", "group", "sockets"):
        assert set(findings(lab, check)) == {"ok"}, check


def test_doctor_names_a_unit_that_is_masked_or_edited(lab: Lab) -> None:
    lab.systemctl("mask", "wcache-engine@.service")
    try:
        assert "systemctl unmask" in findings(lab, "units")["fail"]
    finally:
        lab.systemctl("unmask", "wcache-engine@.service")
    unit = f"{UNITS}/wcache-engine@.service"
    text = lab.path(unit).read_text()
    lab.write(unit, text + "Nice=5\n")
    try:
        assert f"edited by hand: {unit}" in findings(lab, "units")["warn"]
        assert lab.wcache("install", check=False).code == 1
        assert lab.path(unit).read_text().endswith("Nice=5\n")
    finally:
        lab.write(unit, text)
    assert set(findings(lab, "units")) == {"ok"}


def test_uninstall_is_refused_while_a_rank_holds_weights(lab: Lab, instance: str) -> None:
    lab.wcache("up", "--instance", instance, "--model", "/srv/models/llama", "--device", "cpu",
               "--slab-bytes", "2MiB")  # fmt: skip
    done = lab.wcache("uninstall", check=False)
    assert done.code == 1
    assert f"rank {instance}:0" in done.stderr
    assert lab.path(f"{UNITS}/wcache@.service").exists()


@pytest.fixture
def users_manager(lab: Lab) -> Iterator[Lab]:
    """A manager of the user nobody, who has neither session nor privileges."""
    lab.run(
        "systemd-run", "--quiet", "--unit=nobody-manager", f"--uid={NOBODY}",
        "--property=Delegate=yes", "--property=RuntimeDirectory=nobody",
        f"--setenv=XDG_RUNTIME_DIR={HOME}", f"--setenv=HOME={HOME}",
        "/usr/lib/systemd/systemd", "--user",
    )  # fmt: skip
    try:
        socket = lab.path(f"{HOME}/systemd/private")
        wait_for(socket.exists, "the manager of nobody listens")
        yield lab
    finally:
        lab.systemctl("stop", "nobody-manager.service")


def test_a_users_manager_can_do_all_that_its_units_ask_for(users_manager: Lab) -> None:
    """With /bin/true in the interpreter's place: what ends a start is an option of the unit."""
    lab = users_manager
    folder = Path(HOME, ".config")
    inside = lab.path(str(folder))
    for one in plan(Target.user(folder), python="/bin/true", systemd_version=252):
        path = lab.path(str(one.path))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(one.data)
    for path in (inside, *inside.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    systemctl = ("setpriv", f"--reuid={NOBODY}", "--clear-groups", "env",
                 f"XDG_RUNTIME_DIR={HOME}", "systemctl", "--user")  # fmt: skip
    lab.run(*systemctl, "daemon-reload")
    for unit in ("wcache@0.service", "wcache-load@0.service"):
        # Either start is over only when the sandbox is up and the program was begun, or not. The
        # daemon's fails for want of READY=1, which is no matter of the sandbox: its status is 0.
        lab.run(*systemctl, "start", unit, check=False)
        shown = lab.run(*systemctl, "show", unit, "--property=ExecMainStatus").stdout
        assert shown.strip() == "ExecMainStatus=0", unit
        lab.run(*systemctl, "stop", unit)
