"""``wcache restart`` after the configuration was changed under a running rank; room for two."""

import json
import os
import pty
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from tests.cli.node import Node
from tests.cli.snapshot import environment
from tests.cli.views import config, serving
from tests.places import Places
from wcache.config import load_config, save_config
from wcache.output import Output
from wcache.rollout.restart_plan import change_of, differing

pytestmark = pytest.mark.cli

A = config("sha256:" + "a" * 64)
B = config("sha256:" + "b" * 64)


def test_ranks_that_differ_in_the_same_way_share_a_line() -> None:
    views = {0: serving(0, of=A), 1: serving(1, of=A)}
    assert differing(views, (0, 1), B) == (
        "ranks 0, 1: content: cached sha256:aaaaaaaaaaaa…, wanted sha256:bbbbbbbbbbbb…",
    )


def test_what_a_restart_does_not_load_is_no_change(places: Places) -> None:
    instance = places.instance()
    assert change_of(instance, {0: serving(0, of=A)}, A, Output()) is None
    # An engine publishes, and nobody else.
    assert change_of(instance, {0: serving(0, of=A)}, config(loader="publish"), Output()) is None
    # Not in the layout any more: it is served on.
    assert change_of(instance, {1: serving(1, of=A)}, config("sha256:0", tp=1), Output()) is None


def test_a_load_that_can_not_be_is_foretold(places: Places) -> None:
    change = change_of(places.instance(), {0: serving(0, of=A), 1: serving(1, of=B)}, B, Output())
    assert change is not None
    assert change.ranks == (0,)
    assert change.outlook.startswith(
        "the load would fail, and 1.0 GiB of old weights be served on: "
    )


def change_dtype(node: Node) -> None:
    """As an editor does it."""
    was = load_config(node.paths.config_file)
    model = msgspec.structs.replace(was.model, dtype="float32")
    save_config(msgspec.structs.replace(was, model=model), node.paths.config_file)


@pytest.mark.process
def test_a_restart_that_would_load_other_weights_is_refused_until_it_is_wanted(node: Node) -> None:
    assert node.up().code == 0
    change_dtype(node)
    with node.lease():
        before = node.report()
        refused = node("restart")
        assert refused.code == 2
        assert "rank 0: dtype: cached auto, wanted float32; loading takes " in refused.stderr
        assert f"engines keep the old: rank 0: pid {os.getpid()} " in refused.stderr
        assert "--yes" in refused.stderr
        now = node.report()
        assert (now.pid, now.generations) == (before.pid, before.generations)
    done = node("restart", "--yes")
    assert done.code == 0, done.stderr
    assert "adopted generation 1" in done.stderr
    after = node.report()
    assert after.serving is not None
    assert (after.serving.number, after.serving.fingerprint.dtype) == (2, "float32")
    assert node("restart").code == 0


@pytest.mark.process
def test_a_changed_load_that_fails_leaves_the_old_weights(node: Node) -> None:
    assert node.up().code == 0
    change_dtype(node)
    (node.model / "model.safetensors").unlink()
    refused = node("restart")
    assert refused.code == 2
    assert "the load would fail" in refused.stderr
    done = node("restart", "--yes")
    assert done.code == 1
    assert "error: rank 0: the last load failed" in done.stderr
    now = node.report()
    assert now.serving is not None
    assert (now.serving.number, now.serving.how) == (1, "adopted")
    assert node("status").code == 5


@dataclass(frozen=True)
class AtATerminal:
    said: str
    code: int


def at_a_terminal(node: Node, answer: str, *arguments: str) -> AtATerminal:
    """Runs ``wcache`` with a terminal of its own, at which somebody types ``answer``."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "wcache", *arguments], env=environment(node.places),
            stdin=theirs, stdout=subprocess.DEVNULL, stderr=theirs, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        os.write(ours, answer.encode())
        said = b""
        while data := _read(ours):
            said += data
        return AtATerminal(said.decode(), process.wait(60))
    finally:
        os.close(ours)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # EIO: nobody has the other end any more
        return b""


@pytest.mark.process
def test_at_a_terminal_it_is_asked_before_other_weights_are_loaded(node: Node) -> None:
    assert node.up().code == 0
    change_dtype(node)
    before = node.report()
    refused = at_a_terminal(node, "no\n", "restart")
    assert refused.code == 1
    assert "dtype: cached auto, wanted float32" in refused.said
    assert "load the other weights? [y/N]" in refused.said
    assert "nothing was restarted" in refused.said
    assert node.report().pid == before.pid
    done = at_a_terminal(node, "y\n", "restart")
    assert done.code == 0, done.said
    now = node.report()
    assert now.serving is not None
    assert now.serving.fingerprint.dtype == "float32"


@pytest.mark.process
def test_an_instance_that_does_not_fit_is_told_who_holds_the_memory(node: Node) -> None:
    """A checkpoint of 4 TiB, of which the disk holds nothing, beside one of a few MiB."""
    assert node.up("--instance", "draft").code == 0
    nbytes = 4 << 40
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}})
    file: Path = node.model / "model.safetensors"
    with file.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header.encode())
        try:
            out.truncate(8 + len(header) + nbytes)
        except OSError:
            pytest.skip("this file system has no files of 4 TiB")
    try:
        done = node.up()
        assert done.code == 1
        assert "rank 0 needs 4096.0 GiB, " in done.stderr
        assert "is free; instance draft holds 2.0 MiB" in done.stderr
        assert "hint: wcache down --instance draft frees what that one holds" in done.stderr
        assert not node.paths.config_file.exists()
    finally:
        node("down", "--instance", "draft")
