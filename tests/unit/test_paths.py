"""Names of ranks and instances, and where their files lie."""

import os
from pathlib import Path

import pytest

from tests.places import Places
from wcache.errors import UsageError
from wcache.paths import (
    InstancePaths,
    RankId,
    RankPaths,
    check_instance_name,
    check_socket_path,
    rank_meant,
)

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "rank_id"),
    [
        ("0", RankId("", 0)),
        ("17", RankId("", 17)),
        ("draft:3", RankId("draft", 3)),
        ("a.b-c_d:0", RankId("a.b-c_d", 0)),
    ],
)
def test_a_rank_reads_back_as_it_is_written(text: str, rank_id: RankId) -> None:
    assert RankId.parse(text) == rank_id
    assert str(rank_id) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "-1",
        "03",
        "+3",
        " 3",
        "3 ",
        "1.0",
        "٣",
        "1234567",
        ":3",
        "../x:0",
        "a b:0",
        "a:b:0",
    ],
)
def test_what_is_no_rank_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        RankId.parse(text)


@pytest.mark.parametrize("name", ["", ".", "..", "-x", "a/b", "a:b", "a" * 33, "é", "a\n"])
def test_an_instance_name_can_not_leave_its_folder(name: str) -> None:
    with pytest.raises(UsageError):
        check_instance_name(name)


def test_files_of_two_instances_never_meet(places: Places) -> None:
    default, draft = InstancePaths.of(""), InstancePaths.of("draft")
    assert default == places.instance()
    for attribute in (
        "config_file", "lock_file", "supervisor_folder", "supervisor_socket", "supervisor_log",
    ):  # fmt: skip
        assert getattr(default, attribute) != getattr(draft, attribute)
    assert default.rank(3).socket != draft.rank(3).socket
    assert default.log_file(3, "daemon") != draft.log_file(3, "daemon")
    assert default.log_file(3, "daemon") != default.log_file(3, "loader")


def test_a_rank_has_all_its_files_in_one_folder(places: Places) -> None:
    paths = RankPaths.of(RankId("draft", 3))
    files = {paths.socket, paths.ready_file, paths.fingerprint_file}
    assert len(files) == 3
    assert {file.parent for file in files} == {paths.folder}
    assert paths.folder.parent == places.root / "run"


def test_without_overrides_root_uses_the_system_folders_and_others_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RUN", "CONFIG", "STATE"):
        monkeypatch.delenv(f"WCACHE_{name}_DIR", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    paths = InstancePaths.of("")
    assert [str(paths.run), str(paths.config), str(paths.state)] == [
        "/run/wcache", "/etc/wcache", "/var/lib/wcache",
    ]  # fmt: skip
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    paths = InstancePaths.of("")
    assert paths.run == tmp_path / "wcache"
    assert paths.config == tmp_path / "config/wcache"
    assert paths.state == tmp_path / "state/wcache"


def test_a_socket_path_that_the_kernel_would_cut_is_refused() -> None:
    fits = Path("/" + "x" * 106)
    assert check_socket_path(fits) == fits
    with pytest.raises(UsageError, match="108 bytes") as caught:
        check_socket_path(Path("/" + "x" * 107))
    assert "WCACHE_RUN_DIR" in caught.value.hint
    with pytest.raises(UsageError):
        check_socket_path(Path("/" + "é" * 60))


def test_an_instance_can_not_take_the_default_ones_files() -> None:
    with pytest.raises(UsageError, match="can not be named 'wcache'"):
        check_instance_name("wcache")


def test_what_a_program_means_that_names_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WCACHE_RANK", "WCACHE_INSTANCE"):
        monkeypatch.delenv(name, raising=False)
    assert rank_meant(None, None) == RankId("", 0)
    monkeypatch.setenv("WCACHE_RANK", "2")
    monkeypatch.setenv("WCACHE_INSTANCE", "draft")
    assert rank_meant(None, None) == RankId("draft", 2)
    assert rank_meant(0, "") == RankId("", 0)
    with pytest.raises(UsageError, match="not a rank: -1"):
        rank_meant(-1, None)
