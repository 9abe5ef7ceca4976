"""What a process may import: it decides how fast a command and a daemon start."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

HEAVY = {"torch", "transformers", "numpy", "safetensors", "huggingface_hub", "psutil", "pynvml",
         "cuda"}  # fmt: skip
SCREEN = {"typer", "rich", "click"}


def imported_by(program: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after ``program``."""
    code = f"{program}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_the_command_imports_nothing_heavy() -> None:
    assert imported_by("import wcache.cli") & (HEAVY | {"rich", "tomli_w"}) == set()


def test_help_imports_nothing_heavy() -> None:
    program = "import wcache.cli\nassert wcache.cli.run(['up', '--help']) == 0"
    assert imported_by(program) & (HEAVY | {"rich"}) == set()


def test_the_daemon_imports_nothing_heavy_and_nothing_for_a_screen() -> None:
    assert imported_by("import wcache.daemon.__main__") & (HEAVY | SCREEN) == set()


def test_the_daemon_never_imports_commands() -> None:
    code = "import wcache.daemon.__main__, sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = {name for name in done.stdout.split() if name.startswith("wcache.")}
    apart = ("wcache.commands", "wcache.cli", "wcache.supervise", "wcache.load", "wcache.client")
    assert [name for name in sorted(ours) if name.startswith(apart)] == []


def test_the_package_itself_imports_nothing_heavy() -> None:
    assert imported_by("import wcache") & (HEAVY | SCREEN) == set()


def test_little_is_imported_before_an_interrupt_is_heard() -> None:
    code = (
        "import sys\nbefore = set(sys.modules)\nimport wcache.__main__\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"gc", "wcache", "wcache.__main__"}
