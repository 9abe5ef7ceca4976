"""What ``warm`` and ``restart`` once found out of a checkpoint's content is kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.checkpoints import write_llama
from tests.cli.views import serving
from tests.places import Places
from wcache.checkpoint import identify, identities, identity, open_checkpoint
from wcache.config import Config, ModelSection, save_config
from wcache.output import Output
from wcache.paths import InstancePaths
from wcache.rollout import pagecache
from wcache.rollout.candidate import candidate, checkpoint_of
from wcache.rollout.restart_plan import change_of
from wcache.rollout.wanted import Args

pytestmark = pytest.mark.cli

Look = Callable[[Config, InstancePaths, Path], object]


def as_configured(old: Config, paths: InstancePaths, model: Path) -> object:
    return checkpoint_of(candidate(Args(), old, paths, previous=False), paths)


def without_content(old: Config, paths: InstancePaths, model: Path) -> object:
    """As somebody writes the file by hand."""
    section = msgspec.structs.replace(old.model, content=None)
    return as_configured(msgspec.structs.replace(old, model=section), paths, model)


def another_model(old: Config, paths: InstancePaths, model: Path) -> object:
    return checkpoint_of(candidate(Args(model=str(model)), old, paths, previous=False), paths)


def the_one_before(old: Config, paths: InstancePaths, model: Path) -> object:
    save_config(old, paths.previous_file)
    return checkpoint_of(candidate(Args(), other_weights(old), paths, previous=True), paths)


def page_cache(old: Config, paths: InstancePaths, model: Path) -> object:
    save_config(old, paths.config_file)
    pagecache.read(Args(), paths, [], Output(quiet=True), previous=False, dry_run=True)
    return None


def restart(old: Config, paths: InstancePaths, model: Path) -> object:
    change = change_of(paths, {0: serving(0, of=other_weights(old))}, old, Output(quiet=True))
    assert change is not None
    assert change.outlook.startswith("loading takes ")
    return change


def other_weights(config: Config) -> Config:
    section = msgspec.structs.replace(config.model, content="sha256:" + "0" * 64)
    return msgspec.structs.replace(config, model=section)


@pytest.mark.parametrize(
    "look", [as_configured, without_content, another_model, the_one_before, page_cache, restart]
)
def test_a_second_look_reads_no_samples(
    places: Places, monkeypatch: pytest.MonkeyPatch, look: Look
) -> None:
    model = write_llama(places.root / "model")
    content = identify(open_checkpoint(model)).digest
    old = Config(model=ModelSection(path=str(model), content=content))
    # A checkpoint that was written in this moment is sampled each time.
    monkeypatch.setattr(identities, "SETTLED_NS", -(10**12))
    sampled: list[str] = []
    sample = identity._sample

    def watched(checkpoint: Any, file: Any, entries: Any) -> str:
        sampled.append(file.name)
        return sample(checkpoint, file, entries)

    monkeypatch.setattr(identity, "_sample", watched)
    look(old, places.instance(), model)
    assert len(sampled) == 1
    look(old, places.instance(), model)
    assert len(sampled) == 1


def test_other_weights_are_filled_by_the_loader_of_before(places: Places) -> None:
    """What another loader lays out, the engines that attach could not take."""
    before, model = (write_llama(places.root / name) for name in ("before", "model"))
    old = Config(model=ModelSection(path=str(before), loader="vllm", dtype="bfloat16"))
    for args in (Args(model=str(model)), Args(dtype="float16")):
        found = candidate(args, old, places.instance(), previous=False).config.model
        assert found.loader == "vllm"
