"""What is kept to save time is not used where others could have written it, and that is said."""

import logging
from pathlib import Path

import pytest

from wcache.kept import KeptFolder

pytestmark = pytest.mark.unit

NAME = "0" * 32


@pytest.fixture
def kept(tmp_path: Path) -> KeptFolder:
    kept = KeptFolder(tmp_path / "kept")
    kept.write(NAME, b"{}")
    assert kept.read(NAME) == b"{}"
    assert kept.fault() == ""
    return kept


def test_a_folder_that_is_open_to_others_is_not_used_and_told_of_once(
    kept: KeptFolder, caplog: pytest.LogCaptureFixture
) -> None:
    kept.folder.chmod(0o770)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert kept.read(NAME) is None
    assert kept.fault() == "is open to others (mode 770)"
    assert [one.getMessage() for one in caplog.records] == [
        f"{kept.folder} is open to others (mode 770): what is kept there is not used"
        " (wcache doctor)"
    ]


def test_a_link_in_the_folders_place_is_not_followed_and_told_of(
    kept: KeptFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    linked = KeptFolder(tmp_path / "link")
    linked.folder.symlink_to(kept.folder)
    with caplog.at_level(logging.WARNING):
        assert linked.read(NAME) is None
    assert linked.fault() == "is a symbolic link"
    assert f"{linked.folder} is a symbolic link" in caplog.text
    linked.write("1" * 32, b"{}")
    assert [path.name for path in kept.folder.iterdir()] == [f"{NAME}.json"]


def test_a_folder_that_is_not_there_is_nothing_to_tell_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    absent = KeptFolder(tmp_path / "absent")
    with caplog.at_level(logging.WARNING):
        assert absent.read(NAME) is None
    assert (absent.fault(), caplog.text) == ("", "")


def test_an_entry_that_is_no_file_of_ours_alone_is_not_read(kept: KeptFolder) -> None:
    entry = kept.folder / f"{NAME}.json"
    entry.chmod(0o666)
    assert kept.read(NAME) is None
    entry.unlink()
    entry.symlink_to("/etc/hostname")
    assert kept.read(NAME) is None
