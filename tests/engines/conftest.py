"""Leaves these tests out where no engine is: scripts/test-engines.sh makes where they are."""

import importlib.util
from pathlib import Path

import pytest

# Not skipped: .ci/run lets nothing be skipped, and runs them by that script. There pytest fails
# when it finds none of them.
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="module")
def model() -> Path:
    """The demo's language model, which scripts/test-engines.sh has made."""
    folder = Path(__file__).parents[2] / ".demo" / "SmolLM2-135M-Instruct"
    assert (folder / "config.json").exists(), "run scripts/test-engines.sh"
    return folder
