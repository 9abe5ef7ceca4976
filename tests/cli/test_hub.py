"""Hub ids: found in the local cache, pinned to the commit, and said clearly when they are not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import write_llama
from tests.cli.snapshot import environment
from tests.places import Places
from wcache.errors import CheckpointError, UsageError
from wcache.hub import A_MODEL, ResolvedModel, resolve_model

pytestmark = pytest.mark.cli

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_RESOLVE = """
import json, sys
from wcache.errors import WcacheError
from wcache.hub import resolve_model
try:
    found = resolve_model(sys.argv[1], sys.argv[2] or None)
    print(json.dumps([str(found.path), found.hub_id, found.revision]))
except WcacheError as error:
    print(json.dumps([error.message, error.hint, int(error.exit_code)]))
"""


@pytest.fixture
def cache(places: Places) -> Path:
    """The hub's cache with one model as a download leaves it: refs, and a snapshot of links."""
    folder = places.root / "hub" / "models--org--name"
    whole = write_llama(places.root / "whole")
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    for index, file in enumerate(sorted(whole.iterdir())):
        blob = folder / "blobs" / f"{index:040}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def resolve(places: Places, model: str, revision: str = "") -> list[str | int | None]:
    """In a process of its own: huggingface_hub reads its settings when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", _RESOLVE, model, revision],
        env=environment(places),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found: list[str | int | None] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("revision", ["", "main", COMMIT])
def test_a_cached_model_is_pinned_to_its_commit(revision: str, places: Places, cache: Path) -> None:
    assert resolve(places, "org/name", revision) == [str(cache), "org/name", COMMIT]


def test_a_revision_that_is_not_cached_is_named(places: Places, cache: Path) -> None:
    message, hint, code = resolve(places, "org/name", "v9")
    assert message == (
        "org/name at revision v9 is not in the local cache, and the hub can not be reached"
    )
    assert "hf download" in str(hint)
    assert code == 1


def test_a_model_that_is_not_cached_is_named(places: Places) -> None:
    message, _, code = resolve(places, "org/other")
    assert str(message).startswith("org/other is not in the local cache")
    assert code == 1


def test_a_snapshot_that_lacks_weights_is_not_taken_for_the_model(
    places: Places, cache: Path
) -> None:
    """Offline the hub's client gives what there is; the checkpoint then says what is missing."""
    (cache / "model.safetensors").unlink()
    path, hub_id, revision = resolve(places, "org/name")
    assert (path, hub_id, revision) == (str(cache), "org/name", COMMIT)


def test_without_huggingface_hub_a_hub_id_says_what_to_install(places: Places) -> None:
    blocked = "import sys; sys.modules['huggingface_hub'] = None\n" + _RESOLVE
    done = subprocess.run(
        [sys.executable, "-c", blocked, "org/name", ""],
        env=environment(places),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    message, hint, _ = json.loads(done.stdout)
    assert "huggingface_hub" in message
    assert "pip install 'wcache[transformers]'" in hint


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("{}/models/Qwen-8B", "did you mean {}/models/Qwen3-8B?"),
        ("{}/model/Qwen3-8B", "did you mean {}/models/Qwen3-8B?"),
        ("./models/Qwen-8B", "did you mean {}/models/Qwen3-8B?"),
        ("./Qwen3-8B", "there is no {}/Qwen3-8B; " + A_MODEL),
        ("{}/nowhere/Qwen3-8B", "there is no {}/nowhere; " + A_MODEL),
        ("{}/models/other", A_MODEL),
        ("{}/modes/Qwen-8B", "there is no {}/modes; " + A_MODEL),
        ("", A_MODEL),
    ],
)
def test_a_folder_that_is_not_there_is_told_with_one_that_may_be_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, hint: str
) -> None:
    (tmp_path / "models" / "Qwen3-8B").mkdir(parents=True)
    (tmp_path / "models" / "Qwen-8B\x1b[31m").mkdir()
    (tmp_path / "models" / "Qwen-8Bs").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        resolve_model(model.format(tmp_path), None)
    assert caught.value.hint == hint.format(tmp_path)


def test_a_folder_is_never_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert resolve_model("org/name", "mine") == ResolvedModel(
        path=tmp_path / "org" / "name", revision="mine"
    )


def test_headers_of_a_cached_model_are_read_once(places: Places, cache: Path) -> None:
    """They are looked at to see whether the snapshot is whole; a terabyte's take a while."""
    program = (
        "import sys\n"
        "from wcache.checkpoint import folder\n"
        "from wcache.rollout.wanted import Args, from_model\n"
        "read, count = folder.read_header, []\n"
        "folder.read_header = lambda path: count.append(path.name) or read(path)\n"
        "args = Args(device='cpu')\n"
        "found = from_model(args, 'org/name', None, ())\n"
        "print(*count, found.config.model.revision)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(places), capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == f"model.safetensors {COMMIT}\n"


@pytest.mark.parametrize("model", ["/no/where", "./org/name", "name", "a/b/c", "../x", "org/", ""])
def test_what_is_neither_folder_nor_hub_id_is_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError):
        resolve_model(model, None)


def test_revision_without_a_name_is_refused_before_anything_is_looked_for(tmp_path: Path) -> None:
    """A variable that is not set in the operator's script would take any revision otherwise."""
    with pytest.raises(UsageError, match="revision is empty"):
        resolve_model(str(tmp_path), "")
