"""Ranks of a user without privileges, kept by a systemd of that user's own."""

from collections.abc import Iterator

import pytest

from tests.processes import wait_for
from tests.systemd.lab import PYTHON, SOURCE, Done, Lab

pytestmark = pytest.mark.systemd

UID = 65534
HOME = "/run/operator"
MODEL = "/srv/models/llama"
PATIENCE_S = 60.0


class User:
    """An operator who is nobody in particular."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def run(self, *command: str, check: bool = True) -> Done:
        return self._lab.run(
            "setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "env",
            f"XDG_RUNTIME_DIR={HOME}", f"HOME={HOME}", f"PYTHONPATH={SOURCE}", *command,
            check=check,
        )  # fmt: skip

    def wcache(self, *arguments: str, check: bool = True) -> Done:
        return self.run(PYTHON, "-P", "-m", "wcache", *arguments, check=check)

    def show(self, name: str) -> str:
        shown = self.run("systemctl", "--user", "show", "wcache@0.service", "--value", "-p", name)
        return shown.stdout.strip()


@pytest.fixture
def user(lab: Lab) -> Iterator[User]:
    lab.run("chmod", "a+x", "/root")  # the interpreter may lie there
    lab.run(
        "systemd-run", "--quiet", "--unit=operators-manager", f"--uid={UID}", f"--gid={UID}",
        "--property=Delegate=yes", "--property=RuntimeDirectory=operator",
        f"--setenv=XDG_RUNTIME_DIR={HOME}", f"--setenv=HOME={HOME}",
        "/usr/lib/systemd/systemd", "--user",
    )  # fmt: skip
    try:
        wait_for(lab.path(f"{HOME}/systemd/private").exists, "the manager listens", PATIENCE_S)
        yield User(lab)
    finally:
        lab.systemctl("stop", "operators-manager.service")


def test_a_user_keeps_weights_with_a_manager_of_his_own(user: User) -> None:
    user.run("mkdir", "-p", f"{HOME}/.config/wcache")
    user.run("sh", "-c", f"echo PYTHONPATH={SOURCE} > {HOME}/.config/wcache/environment")
    user.wcache("install", "--user")
    user.wcache("up", "--model", MODEL, "--device", "cpu", "--slab-bytes", "2MiB")
    assert user.show("ActiveState") == "active"
    assert user.show("UnitFileState") == "enabled"
    stored = int(user.show("NFileDescriptorStore"))
    assert stored > 8
    assert "adopted generation 1" in user.wcache("restart").stderr
    pid = user.show("MainPID")
    user.run("kill", "-KILL", pid)
    wait_for(lambda: user.show("MainPID") not in ("0", pid), "another daemon", PATIENCE_S)
    wait_for(lambda: user.wcache("status", check=False).code == 0, "it is ready", PATIENCE_S)
    assert "adopted" in user.wcache("status").stdout
    assert int(user.show("NFileDescriptorStore")) == stored
    assert "freed" in user.wcache("down", "--disable").stderr
    assert user.show("NFileDescriptorStore") == "0"
    assert user.show("UnitFileState") == "disabled"
