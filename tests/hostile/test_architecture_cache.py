"""What is kept of architectures, damaged or written by somebody else, decides nothing."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import write_llama
from wcache.checkpoint import Checkpoint, open_checkpoint
from wcache.load import architectures as module
from wcache.load.architectures import Architectures
from wcache.load.parallel import ParallelPlan

pytestmark = pytest.mark.hostile

TRUE = ParallelPlan(
    architecture="LlamaForCausalLM", prefix="model", base={"layers.*.mlp.up_proj": "colwise"}
)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    monkeypatch.setattr(module, "released", lambda: "5.0.0")
    monkeypatch.setattr(module, "read_parallel_plan", lambda _: TRUE)
    return open_checkpoint(write_llama(tmp_path / "m"))


@pytest.fixture
def entry(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    Architectures(tmp_path / "architecture").parallel_plan(checkpoint)
    (entry,) = (tmp_path / "architecture").iterdir()
    return entry


@pytest.fixture
def asked(
    checkpoint: Checkpoint, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], bool]:
    """Whether transformers is asked, with the entry as it is now; its answer is right anyway."""
    assert Architectures(entry.parent, keep=False).parallel_plan(checkpoint) == TRUE

    def ask() -> bool:
        times: list[Checkpoint] = []

        def asking(checkpoint: Checkpoint) -> ParallelPlan:
            times.append(checkpoint)
            return TRUE

        monkeypatch.setattr(module, "read_parallel_plan", asking)
        assert Architectures(entry.parent, keep=False).parallel_plan(checkpoint) == TRUE
        return bool(times)

    assert not ask()
    return ask


def _rowwise(content: dict[str, Any]) -> None:
    content["value"]["base"]["layers.*.mlp.up_proj"] = "rowwise"


CHANGES: list[Callable[[dict[str, Any]], object]] = [
    _rowwise,
    lambda content: content["value"].pop("base"),
    lambda content: content["value"].update(prefix="transformer"),
    lambda content: content.update(value={}),
    lambda content: content.update(value=None),
    lambda content: content.update(value=[1]),
    lambda content: content.update(about=content["about"].replace("5.0.0", "5.0.1")),
    lambda content: content.update(digest="0" * 64),
    lambda content: content.update(digest=None),
    lambda content: content.update(unknown=1),
    lambda content: content.pop("value"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_an_entry_that_was_edited_decides_nothing(
    entry: Path, asked: Callable[[], bool], change: Callable[[dict[str, Any]], object]
) -> None:
    content = json.loads(entry.read_text())
    change(content)
    entry.write_text(json.dumps(content, separators=(",", ":")))
    assert asked()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 200_000, b"\0" * 4096]
)
def test_what_is_no_entry_decides_nothing(
    entry: Path, asked: Callable[[], bool], content: bytes
) -> None:
    entry.write_bytes(content)
    assert asked()


def test_half_an_entry_is_written_anew(checkpoint: Checkpoint, entry: Path) -> None:
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2])
    assert Architectures(entry.parent).parallel_plan(checkpoint) == TRUE
    assert entry.read_bytes() == whole


def test_a_value_of_another_shape_decides_nothing(entry: Path, asked: Callable[[], bool]) -> None:
    """Even with a digest that fits: what cuts weights is checked by type as well."""
    content = json.loads(entry.read_text())
    raw = json.dumps({"architecture": 3}).encode()
    content |= {"value": json.loads(raw), "digest": module._digest(content["about"], raw)}
    entry.write_text(json.dumps(content))
    assert asked()


def test_an_entry_that_others_may_write_to_is_ignored(
    entry: Path, asked: Callable[[], bool]
) -> None:
    entry.chmod(0o666)
    assert asked()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_an_entry_of_another_user_is_ignored(entry: Path, asked: Callable[[], bool]) -> None:
    os.chown(entry, 12345, -1)
    assert asked()
