"""``install``, ``uninstall`` and ``doctor`` as whole commands, in folders of the test's own."""

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.snapshot import Done, check, environment, wcache
from tests.daemons import Start, published
from tests.places import Places, publish_config
from tests.processes import Store

pytestmark = pytest.mark.cli

CHECKOUT = Path(__file__).parent.parent.parent


@pytest.fixture
def image(places: Places) -> Path:
    """A root with the interpreter in it, as an image that the units are put into."""
    root = places.root / "image"
    python = root / sys.executable.lstrip("/")
    python.parent.mkdir(parents=True)
    python.touch()
    return root


def run(places: Places, *arguments: str) -> Done:
    done = wcache(places, *arguments)
    return replace(done, stderr=done.stderr.replace(sys.executable, "<PYTHON>"))


def test_install_prints_each_file_that_it_writes(places: Places, image: Path) -> None:
    folder = ("--root", str(image))
    check(run(places, "install", *folder, "--dry-run"), "install_dry_run", places.root)
    assert not (image / "usr/local").exists()
    check(run(places, "install", *folder), "install", places.root)
    check(run(places, "install", *folder), "install_again", places.root)
    with (image / "usr/local/lib/systemd/system/wcache@.service").open("a") as file:
        file.write("Nice=5\n")
    check(run(places, "install", *folder), "install_edited", places.root)
    check(run(places, "uninstall", *folder, "--dry-run"), "uninstall_dry_run", places.root)
    check(run(places, "uninstall", *folder), "uninstall", places.root)
    (image / "usr/local/lib/systemd/system/wcache@.service").unlink()
    check(run(places, "uninstall", *folder), "uninstall_again", places.root)


def test_an_image_without_the_interpreter_is_warned_of(places: Places) -> None:
    done = run(places, "install", "--root", str(places.root / "empty"))
    assert done.code == 0
    assert "the units start <PYTHON>, which is not below" in done.stderr


def test_a_users_units_go_to_the_users_folder(places: Places) -> None:
    home = places.root / "home"
    done = wcache(places, "install", "--user", extra={"XDG_CONFIG_HOME": str(home),
                                                      "XDG_RUNTIME_DIR": str(home)})  # fmt: skip
    assert done.code == 0, done.stderr
    assert (home / "systemd/user/wcache@.service").is_file()
    assert {path.name for path in home.iterdir()} == {"systemd"}
    assert "no systemd runs here" in done.stderr


def test_links_that_uninstall_leaves_are_removed_by_one_command(places: Places) -> None:
    home = places.root / "home"
    extra = {"XDG_CONFIG_HOME": str(home), "XDG_RUNTIME_DIR": str(home)}
    assert wcache(places, "install", "--user", extra=extra).code == 0
    wants = home / "systemd/user/wcache.target.wants"
    wants.mkdir()
    for name in ("wcache@0.service", "wcache@draft:1.service"):
        (wants / name).symlink_to(home / "systemd/user/wcache@.service")
    assert "lead nowhere" not in wcache(places, "uninstall", "--user", "-n", extra=extra).stderr
    done = wcache(places, "uninstall", "--user", extra=extra)
    assert "2 links of units that a boot started lead nowhere now" in done.stderr
    assert "systemctl --user disable wcache@0.service wcache@draft:1.service\n" in done.stderr


@pytest.mark.process
def test_uninstall_is_refused_while_ranks_hold_weights(
    places: Places, store: Store, start: Start
) -> None:
    places.write_config(publish_config())
    start(ready=False)
    store.serve(lambda: places.rank().socket.exists())
    published(places, store, [b"weights"])
    # --user with folders of the test's own: nothing of this machine would be removed.
    home = {"XDG_CONFIG_HOME": str(places.root / "home"), "XDG_RUNTIME_DIR": str(places.root)}
    done = wcache(places, "uninstall", "--user", extra=home)
    assert done.code == 1
    assert "ranks hold weights: rank 0 2.0 MiB" in done.stderr
    assert wcache(places, "uninstall", "--user", "--force", extra=home).code == 0


def test_doctor_is_content_with_a_machine_on_which_nothing_was_done(places: Places) -> None:
    done = wcache(places, "doctor", "--json")
    found = json.loads(done.stdout)
    assert done.code == 0, done.stdout
    assert {finding["result"] for finding in found["findings"]} <= {"ok", "warn"}
    assert found["version"] == 1


def test_doctor_fails_for_a_configuration_that_can_not_be_read(places: Places) -> None:
    file = places.instance("draft").config_file
    file.parent.mkdir(parents=True)
    file.write_text("[model\n")
    done = wcache(places, "doctor", "--instance", "draft")
    assert done.code == 1
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("configuration"))
    assert f"edit {file}" in row
    assert wcache(places, "doctor").code == 0


def test_doctor_imports_no_torch(places: Places) -> None:
    places.write_config(publish_config())
    program = (
        "import sys, wcache.cli\n"
        "wcache.cli.run(['doctor'])\n"
        "print(*{'torch', 'transformers', 'numpy'} & set(sys.modules), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", program], env=environment(places), text=True,
                         capture_output=True, timeout=60, check=True)  # fmt: skip
    assert ran.stderr.strip() == ""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=CHECKOUT, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, check=True, timeout=60,
    )  # fmt: skip
    (built,) = tmp_path.glob("*.whl")
    return built


def test_an_installed_wheel_has_its_units_with_it(wheel: Path, places: Places, image: Path) -> None:
    site = places.root / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # Tells the wheel's files from the checkout's.
    with (site / "wcache/systemd/wcache.target").open("a") as file:
        file.write("# from the wheel\n")
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "wcache", "install", "--root", str(image)],
        env=environment(places) | {"PYTHONPATH": str(site)}, cwd=places.root, text=True,
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    target = image / "usr/local/lib/systemd/system/wcache.target"
    assert target.read_text().endswith("# from the wheel\n")
    names = {path.name for path in (site / "wcache/systemd").iterdir()}
    assert names == {path.name for path in (CHECKOUT / "systemd").iterdir()}
