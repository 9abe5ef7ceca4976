"""Fixtures of the tests with a real systemd: a lab, a checkpoint in it, and an instance to use."""

import re
from collections.abc import Iterator

import pytest

from tests.checkpoints import llama_config, llama_tensors, write_checkpoint
from tests.systemd.lab import Lab

# 16 MiB: more than an interpreter reads from its files when it starts.
LAYERS = 400


def write_model(lab: Lab) -> str:
    """Puts a checkpoint into the lab; returns its path there."""
    config = llama_config(num_hidden_layers=LAYERS)
    folder = write_checkpoint(lab.models / "llama", llama_tensors(layers=LAYERS), config)
    (folder / "model.safetensors").chmod(0o644)
    return "/srv/models/llama"


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """One lab for all tests; each has an instance of its own in it."""
    made = Lab()
    try:
        write_model(made)
        made.up()
        made.install()
        yield made
    finally:
        made.close()


@pytest.fixture
def instance(lab: Lab, request: pytest.FixtureRequest) -> Iterator[str]:
    """A name of the test's own, of which nothing is left afterwards."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_"))[:30].strip("-")
    yield name
    lab.wcache("down", "--instance", name, "--force", "--disable", check=False)
    lab.path(f"/etc/wcache/{name}.toml").unlink(missing_ok=True)
