"""A rank of more slabs than a login may open files: what wcache starts raises the limit itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoints import llama_config, write_checkpoint
from tests.cli.node import SMALL, Node, other
from tests.cli.snapshot import environment
from wcache.errors import ExitCode

pytestmark = [pytest.mark.cli, pytest.mark.process]

ALLOWED = 48
"""Open files at first, in place of the 1,024 of a login: enough for Python, torch and the rest."""
SLABS = 60


def few(node: Node, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """``wcache`` from a shell that may open :data:`ALLOWED` files, and could have more."""
    limited = ["sh", "-c", f'ulimit -Sn {ALLOWED}; exec "$@"', "sh"]
    return subprocess.run(
        [*limited, sys.executable, "-m", "wcache", *arguments],
        env=environment(node.places), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_it_is_loaded_restarted_and_verified(node: Node) -> None:
    tensors = {"weight": torch.zeros(SLABS * (2 << 20), dtype=torch.uint8)}
    model = write_checkpoint(node.root / "many", tensors, llama_config())
    for arguments in (
        ("up", "--model", str(model), *SMALL),
        ("restart",),
        ("verify",),
    ):
        done = few(node, *arguments)
        assert done.returncode == 0, done.stderr
    assert node.report().expected_fds > SLABS
    assert node.status()["ranks"][0]["stored_fds"] == node.report().expected_fds


def hollow(folder: Path) -> Path:
    """A checkpoint of 10 GiB in ``folder``, of which the disk holds nothing."""
    nbytes = 10 << 30
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}})
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header.encode())
        out.truncate(8 + len(header) + nbytes)
    return folder


def test_more_than_can_be_handed_over_are_refused_before_anything_is_touched(node: Node) -> None:
    hollow(node.model)
    done = node.up()
    if "not enough memory" in done.stderr:
        pytest.skip("this machine has no 10 GiB to plan with")
    assert done.code == ExitCode.USAGE
    assert "rank 0 would need 5120 slabs, at most 4095 are handed over" in done.stderr
    assert not node.paths.config_file.exists()


def test_warm_refuses_them_too_and_leaves_what_is_served(node: Node) -> None:
    assert node.up().code == 0
    before = node.report().generations
    done = node("warm", "--model", str(hollow(Path(other(node)))))
    if "not enough memory" in done.stderr:
        pytest.skip("this machine has no 10 GiB to plan with")
    assert done.code == ExitCode.FAILED
    assert "rank 0 would need 5120 slabs, at most 4095 are handed over" in done.stderr
    assert node.report().generations == before
