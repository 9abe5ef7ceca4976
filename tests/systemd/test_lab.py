"""The lab on a machine that has no systemd of its own, as far as this one can tell."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.systemd.lab import SCRIPT, Lab

pytestmark = pytest.mark.systemd


def write(path: Path, text: str, mode: int = 0o755) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def package(folder: Path, name: str, files: dict[str, str]) -> None:
    tree = folder / f"{name}.tree"
    for file, text in files.items():
        write(tree / file, text)
    control = (
        f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: nobody\nDescription: -\n"
    )
    write(tree / "DEBIAN" / "control", control, 0o644)
    subprocess.run(["dpkg-deb", "--build", tree, folder / f"{name}.deb"], stdout=subprocess.DEVNULL,
                   timeout=60, check=True)  # fmt: skip


def lay(packages: Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([SCRIPT, "lay", packages, folder], capture_output=True, text=True,
                          timeout=60, check=False)  # fmt: skip


def test_packages_are_laid_as_a_system_whose_lib_is_that_of_usr(tmp_path: Path) -> None:
    # Debian's own have files in both.
    package(tmp_path, "systemd", {"lib/systemd/systemd": "1", "bin/systemctl": "2"})
    package(tmp_path, "library", {"usr/lib/x/libnew.so": "3", "usr/share/doc/x/readme": "4"})
    done = lay(tmp_path, tmp_path / "laid")
    assert (done.returncode, done.stderr) == (0, "")
    laid = tmp_path / "laid"
    files = {path.relative_to(laid): path.read_text() for path in laid.rglob("*") if path.is_file()}
    assert files == {
        Path("usr/lib/systemd/systemd"): "1",
        Path("usr/bin/systemctl"): "2",
        Path("usr/lib/x/libnew.so"): "3",
    }


def test_packages_without_a_systemd_are_refused(tmp_path: Path) -> None:
    assert "there is no .deb" in lay(tmp_path, tmp_path / "laid").stderr
    package(tmp_path, "library", {"usr/lib/x/libnew.so": "3"})
    done = lay(tmp_path, tmp_path / "laid")
    assert done.returncode == 1
    assert "no systemd is among the packages" in done.stderr


def test_what_is_laid_is_seen_beneath_the_machines_own(tmp_path: Path) -> None:
    laid = tmp_path / "laid"
    write(laid / "usr/lib/systemd/systemd", "not one that could boot")
    write(laid / "usr/bin/only-laid", "#!/bin/sh\necho from what is laid\n")
    lab = Lab()
    lab.environment["WCACHE_LAB_SYSTEMD"] = str(laid)
    try:
        lab.up()
        assert lab.run("only-laid").stdout == "from what is laid\n"
        own = lab.path("/usr/lib/systemd/systemd")
        assert own.read_bytes() == Path("/usr/lib/systemd/systemd").read_bytes()
    finally:
        lab.close()


def test_a_boot_that_can_not_be_is_refused_in_words(tmp_path: Path) -> None:
    folder = tmp_path / "lab"
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", SCRIPT, "up"],
        env={**os.environ, "WCACHE_LAB": str(folder)}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "systemd-lab: needs root\n")
    assert not folder.exists()
