"""The unit files as systemd judges them, without one that runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.systemd.lab import CHECKOUT

pytestmark = pytest.mark.systemd

UNITS = CHECKOUT / "systemd"


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """A folder with the units, as an interpreter of this machine runs them."""
    for file in UNITS.iterdir():
        if file.suffix in (".service", ".target"):
            text = file.read_text().replace("@PYTHON@", sys.executable)
            (tmp_path / file.name).write_text(text)
    return tmp_path


def analyze(*arguments: str, units: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["systemd-analyze", *arguments],
        # The units refer to each other.
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{units}:", "SYSTEMD_COLORS": "0"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "wcache@3.service", "wcache-load@3.service", "wcache-engine@chat.service", "wcache.target",
    ],
)  # fmt: skip
def test_systemd_has_nothing_to_say_of_a_unit(name: str, units: Path) -> None:
    # An instance is verified by a file of its name; the status is 0 also after complaints.
    template = units / (name.partition("@")[0] + "@.service" if "@" in name else name)
    unit = units / name
    if unit != template:
        unit.write_text(template.read_text())
    done = analyze("verify", "--man=no", str(unit), units=units)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


@pytest.mark.parametrize(
    ("name", "tenths"), [("wcache@.service", 15), ("wcache-load@.service", 35)]
)
def test_a_unit_is_no_more_exposed_than_this(name: str, tenths: int, units: Path) -> None:
    done = analyze(
        "security", "--offline=true", "--no-pager", f"--threshold={tenths}", str(units / name),
        units=units,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "Overall exposure level" in done.stdout


def test_every_program_of_a_unit_is_the_interpreter_that_install_puts_in() -> None:
    for name, module in (("wcache@.service", "daemon"), ("wcache-load@.service", "load")):
        text = (UNITS / name).read_text()
        assert f"\nExecStart=@PYTHON@ -P -m wcache.{module} %i\n" in text


def test_one_module_alone_calls_systemd() -> None:
    command = re.compile(r"""[\[(]\s*["'](systemctl|journalctl)["'],""")
    callers = {
        file.relative_to(CHECKOUT).as_posix()
        for file in (CHECKOUT / "wcache").rglob("*.py")
        if command.search(file.read_text())
    }
    assert callers == {"wcache/supervise/systemd/manager.py"}
