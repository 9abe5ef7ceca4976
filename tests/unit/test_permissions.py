"""Whoever is refused is told what keeps him out, and whom it lets in."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.places import Places
from tests.users import NOBODY, without_privileges
from wcache.machine.permissions import as_root, who_may

pytestmark = pytest.mark.unit

as_user_of_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


@pytest.fixture
def file(places: Places) -> Path:
    """In folders that everybody may enter."""
    places.root.chmod(0o755)
    made = places.root / "folder" / "file"
    made.parent.mkdir()
    made.touch()
    return made


def test_what_is_allowed_needs_no_hint(file: Path) -> None:
    assert who_may(file, os.R_OK) == ""
    assert who_may(file.parent / "absent", os.R_OK) == ""


@as_user_of_root
def test_the_first_barrier_is_named_whatever_lies_behind_it(file: Path) -> None:
    file.chmod(0o640)
    os.chown(file, 0, NOBODY - 1)
    with without_privileges():
        assert who_may(file, os.R_OK) == (
            f"{file} (mode 640) is open to root and the group gid {NOBODY - 1} alone"
        )
        assert who_may(file, os.W_OK) == f"{file} (mode 640) is open to root alone"
    file.parent.chmod(0o700)
    with without_privileges():
        assert who_may(file, os.R_OK) == f"{file.parent} (mode 700) is open to root alone"


def test_what_is_closed_to_its_owner_too_is_open_to_root(file: Path) -> None:
    file.chmod(0)
    with without_privileges():
        assert who_may(file, os.R_OK) == f"{file} (mode 0) is open to root alone"


@as_user_of_root
def test_a_barrier_behind_a_link_is_found(file: Path) -> None:
    link = file.parent.parent / "link"
    link.symlink_to(file)
    file.parent.chmod(0o700)
    with without_privileges():
        assert who_may(link, os.R_OK).startswith(f"{file.parent} ")


def test_the_call_for_root_has_this_calls_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WCACHE_RUN_DIR", "/a b")
    words = shlex.split(as_root(["logs", "0"]))
    assert words[0] == "sudo"
    assert "WCACHE_RUN_DIR=/a b" in words
    assert words[-5:] == [*[sys.executable, "-P", "-m", "wcache"][1:], "logs", "0"]
