"""An interpreter that the daemon's unit could not start is found before it is tried."""

import os
from pathlib import Path

import pytest

import wcache
from wcache.machine.interpreter import needed_paths, needs_pythonpath, problems

pytestmark = pytest.mark.unit

OPEN = b"[Service]\nProtectHome=read-only\n"


def test_what_private_folders_hide_is_named() -> None:
    (problem,) = problems([Path("/tmp/env/bin/python")], OPEN + b"PrivateTmp=yes\n")
    assert "sees nothing of /tmp" in problem
    (problem,) = problems([Path("/home/ann/python")], b"ProtectHome=yes\n")
    assert "sees nothing of /home" in problem


def test_what_a_unit_does_not_hide_is_no_problem() -> None:
    assert list(problems([Path("/usr/bin/env")], OPEN + b"PrivateTmp=yes\n")) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_folder_that_is_closed_to_root_without_privileges_is_named(tmp_path: Path) -> None:
    home = tmp_path / "ann"
    (home / "bin").mkdir(parents=True)
    (home / "bin/python").touch()
    os.chown(home, 1234, 1234)
    home.chmod(0o700)
    (problem,) = problems([home / "bin/python"], OPEN)
    assert f"{home} has mode 700" in problem


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_an_interpreter_that_another_user_could_change_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch()
    os.chown(python, 1234, -1)
    (problem,) = problems([python], OPEN)
    assert "uid 1234" in problem


def test_the_package_is_among_what_is_needed() -> None:
    assert Path(wcache.__file__).parent in needed_paths()


def test_a_pythonpath_that_units_lack_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "environment"
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert not needs_pythonpath(file)
    parent = Path(wcache.__file__).parent.parent
    monkeypatch.setenv("PYTHONPATH", f"/elsewhere:{parent}")
    assert needs_pythonpath(file)
    file.write_text(f"HF_HOME=/models\nPYTHONPATH={parent}\n")
    assert not needs_pythonpath(file)
