"""The release of transformers that an import takes, told without importing it."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from wcache.load.release import released

pytestmark = pytest.mark.unit


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The metadata of a transformers 9.9.9 that is found first."""
    site = tmp_path / "site"
    _write_package(site, "9.9.9")
    info = site / "transformers-9.9.9.dist-info"
    info.mkdir()
    _write_metadata(info, "9.9.9")
    monkeypatch.syspath_prepend(str(site))
    # What was imported is what is asked, whatever the path says now.
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    return info


def _write_metadata(info: Path, version: str) -> None:
    text = f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n"
    (info / "METADATA").write_text(text)


def _write_package(site: Path, version: str) -> None:
    package = site / "transformers"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(f'import abc\n\n__version__ = "{version}"\n')


@pytest.mark.parametrize(
    ("version", "is_release"),
    [("9.9.9", True), ("5.25.0rc1", True), ("5.24.0.post1", True), ("5.25.0.dev0", False),
     ("5.24.0+ours", False)],
)  # fmt: skip
def test_a_release_is_told_by_its_number_and_a_build_is_not(
    installed: Path, version: str, is_release: bool
) -> None:
    _write_metadata(installed, version)
    _write_package(installed.parent, version)
    assert released() == (version if is_release else None)


def test_the_release_that_is_here_is_told_before_and_after_its_import() -> None:
    """Its own files say what its metadata does; nothing would ever be kept otherwise."""
    pytest.importorskip("transformers")
    code = (
        "from wcache.load.release import released\nbefore = released()\nimport transformers\n"
        "print(before == released() == transformers.__version__)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert told == b"True\n"


def test_what_was_installed_from_a_folder_has_no_number_to_go_by(installed: Path) -> None:
    told = '{"url": "file:///home/me/transformers", "dir_info": {"editable": true}}'
    (installed / "direct_url.json").write_text(told)
    assert released() is None


def test_a_working_copy_in_front_of_a_release_is_not_taken_for_it(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_package(tmp_path / "checkout", "9.9.9")
    assert released() == "9.9.9"
    monkeypatch.syspath_prepend(str(tmp_path / "checkout"))
    assert installed.is_dir()
    assert released() is None


def test_the_metadata_of_the_version_before_is_not_gone_by(installed: Path) -> None:
    """As an upgrade that was ended leaves it behind."""
    _write_package(installed.parent, "9.9.10")
    assert released() is None


def test_what_was_imported_counts_and_not_what_would_be(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    assert installed.is_dir()
    assert released() is None
