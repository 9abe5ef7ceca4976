"""Shipped units get to their places, edited ones are left alone, and only our own are removed."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from wcache.errors import NoPermissionError, WcacheError
from wcache.install import (
    Action,
    Planned,
    Target,
    install,
    installed,
    is_ours,
    plan,
    shipped_folder,
    uninstall,
    version_below,
)

pytestmark = pytest.mark.unit

PYTHON = "/opt/wcache/bin/python"


def planned(target: Target, version: int = 252, python: str = PYTHON) -> list[Planned]:
    return plan(target, python=python, systemd_version=version)


def done(target: Target, version: int = 252, *, dry_run: bool = False) -> dict[str, Action]:
    """What an install did, by file name."""
    changes = install(target, planned(target, version), dry_run=dry_run)
    return {change.path.name: change.action for change in changes}


def undone(target: Target) -> dict[str, Action]:
    changes = uninstall(target, planned(target, 999), dry_run=False)
    return {change.path.name: change.action for change in changes}


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return Target.system(tmp_path)


def test_every_shipped_file_has_a_place(target: Target) -> None:
    names = {entry.name for entry in shipped_folder().iterdir()}
    assert "wcache@.service" in names
    assert len(planned(target, 999)) == len(names)


def test_files_go_where_an_operator_can_still_override_them(tmp_path: Path) -> None:
    done(Target.system(tmp_path))
    lib = tmp_path / "usr/local/lib"
    assert (lib / "systemd/system/wcache@.service").is_file()
    assert (lib / "sysusers.d/wcache.conf").is_file()
    assert (lib / "tmpfiles.d/wcache.conf").is_file()
    assert not (tmp_path / "etc").exists()


def test_units_name_the_interpreter_and_no_placeholder(target: Target) -> None:
    for one in planned(target, 999):
        assert not re.search(rb"@[A-Z_]+@", one.data), one.path
    unit = next(one.data for one in planned(target) if one.path.name == "wcache@.service")
    assert f"ExecStart={PYTHON} -P -m wcache.daemon %i\n".encode() in unit


def test_an_interpreter_that_needs_quotes_is_refused(target: Target) -> None:
    for python in ("/home/my name/python", "/opt/50%/python", 'python"', "python3"):
        with pytest.raises(WcacheError, match="can not name"):
            planned(target, python=python)


def test_a_second_install_changes_nothing(target: Target) -> None:
    assert set(done(target).values()) == {"wrote"}
    before = {path: path.stat().st_mtime_ns for path in installed(target)}
    assert set(done(target).values()) == {"unchanged"}
    assert {path: path.stat().st_mtime_ns for path in installed(target)} == before


def test_a_dry_run_touches_nothing(target: Target, tmp_path: Path) -> None:
    assert set(done(target, dry_run=True).values()) == {"would write"}
    assert list(tmp_path.iterdir()) == []


def test_an_edited_file_is_kept_and_named(target: Target) -> None:
    done(target)
    edited = target.units / "wcache@.service"
    with edited.open("a") as file:
        file.write("[Service]\nNice=5\n")
    text = edited.read_text()
    assert done(target)["wcache@.service"] == "kept"
    assert undone(target)["wcache@.service"] == "kept"
    assert edited.read_text() == text
    assert [path.name for path in target.units.iterdir()] == ["wcache@.service"]


def test_a_file_of_somebody_else_is_kept(target: Target) -> None:
    target.units.mkdir(parents=True)
    (target.units / "wcache.target").write_text("[Unit]\n")
    assert done(target)["wcache.target"] == "kept"


def test_a_mask_in_a_units_place_is_kept(target: Target) -> None:
    target.units.mkdir(parents=True)
    (target.units / "wcache.target").symlink_to("/dev/null")
    assert done(target)["wcache.target"] == "kept"
    assert (target.units / "wcache.target").is_symlink()


def test_what_an_older_install_wrote_is_replaced(target: Target) -> None:
    for _ in install(target, planned(target, python="/old/python"), dry_run=False):
        pass
    assert done(target)["wcache@.service"] == "wrote"
    assert PYTHON in (target.units / "wcache@.service").read_text()


def test_stop_keeps_weights_only_where_systemd_can(target: Target) -> None:
    assert "preserve.conf" not in done(target, 253)
    assert done(target, 254)["preserve.conf"] == "wrote"
    assert (target.units / "wcache@.service.d/preserve.conf").is_file()


def test_what_does_not_belong_there_any_more_is_removed(target: Target) -> None:
    done(target, 254)
    assert done(target, 252)["preserve.conf"] == "removed"
    assert not (target.units / "wcache@.service.d").exists()


def test_uninstall_leaves_nothing_of_ours_and_all_of_others(target: Target) -> None:
    done(target, 254)
    own = target.units / "wcache@.service.d/mine.conf"
    other = target.units / "wcache-backup.service"
    for file in (own, other):
        file.write_text("[Service]\nNice=5\n")
    assert set(undone(target).values()) == {"removed"}
    assert installed(target) == []
    assert own.exists()
    assert other.exists()


def test_uninstall_of_nothing_does_nothing(target: Target) -> None:
    assert undone(target) == {}


def test_a_users_manager_gets_units_that_it_can_start(tmp_path: Path) -> None:
    target = Target.user(tmp_path / "config")
    units = {one.path.name: one.data.decode() for one in planned(target, 999)}
    assert "wcache.conf" not in units
    for text in units.values():
        keys = {line.partition("=")[0] for line in text.splitlines()}
        assert not keys & {"User", "Group", "CapabilityBoundingSet", "PrivateDevices"}
        assert "multi-user.target" not in text.partition("[Install]")[2]
    assert "WantedBy=default.target" in units["wcache.target"]
    assert "SystemCallFilter=" in units["wcache@.service"]


def test_a_line_that_goes_on_is_left_out_whole(tmp_path: Path) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    text = "[Service]\nCapabilityBoundingSet=CAP_CHOWN \\\n  CAP_KILL\nNice=5\n"
    (shipped / "wcache@.service").write_text(text)
    user = Target.user(tmp_path / "config")
    (one,) = plan(user, python=PYTHON, systemd_version=252, shipped=shipped)
    assert one.data.decode().splitlines()[1:] == ["[Service]", "Nice=5"]


def test_a_file_tells_by_itself_whether_it_was_edited(target: Target) -> None:
    (data, *_) = (one.data for one in planned(target))
    assert is_ours(data)
    assert not is_ours(data + b"\n")
    assert not is_ours(data.partition(b"\n")[2])
    assert not is_ours(b"")


def test_the_systemd_of_an_image_is_known_by_its_library(tmp_path: Path) -> None:
    assert version_below(tmp_path) == 0
    folder = tmp_path / "usr/lib/x86_64-linux-gnu/systemd"
    folder.mkdir(parents=True)
    (folder / "libsystemd-shared-257.5-2.so").touch()
    assert version_below(tmp_path) == 257


@pytest.fixture
def nobody() -> Iterator[None]:
    """This process without root's rights."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    yield
    os.seteuid(before)


def test_no_permission_is_said_with_what_to_do(tmp_path: Path, nobody: None) -> None:
    folder = tmp_path
    if os.getuid() != 0:
        folder.chmod(0o500)
    with pytest.raises(NoPermissionError) as raised:
        done(Target.system(folder))
    assert "sudo" in raised.value.hint


def test_a_file_in_a_folders_place_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "usr").write_text("")
    with pytest.raises(WcacheError, match="not a directory"):
        done(Target.system(tmp_path))
