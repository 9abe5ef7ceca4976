"""The demo's claims on the real language model, and engines that outlive their daemon."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="session")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as scripts/demo.sh makes it, kept between runs in the checkout."""
    folder = SCRIPTS.parent / ".demo" / "SmolLM2-135M-Instruct"
    subprocess.run([sys.executable, SCRIPTS / "smollm2.py", folder], check=True, timeout=300)
    return folder


@pytest.mark.timeout(600)
def test_every_claim_of_the_demo_holds(real_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "demo.py", real_model],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Everything above was checked" in done.stdout
    assert "tp 2 would split a head: 3 key-value heads" in done.stderr
