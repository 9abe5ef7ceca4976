"""A real model in scripts over host slabs: one process, and three that share it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engines import script
from tests.engines.serving import environment, until, wcache
from tests.places import Places
from wcache.engines.orders import Orders
from wcache.engines.transformers import from_cache
from wcache.errors import MismatchError, NoSuchRankError
from wcache.protocol.control import Control
from wcache.protocol.messages import AskReport, Report
from wcache.run.timeline import Record, load, read_events, records

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SCRIPT = Path(script.__file__)
CLOSE = 1e-3
"""Of logits up to 30 in float32, whose sums over three ranks are made in another order."""

Answers = list[list[int]]


@pytest.fixture(scope="module")
def places(model: Path) -> Iterator[Places]:
    """Rank 0 of the default instance has the model, ranks 0 to 2 of ``three`` share it."""
    made = Places(Path(tempfile.mkdtemp(prefix="wc")))
    wcache(made, "up", "--model", str(model), "--device", "cpu")
    yield made
    for instance in ("", "three"):
        if made.instance(instance).config_file.exists():
            named = ("--instance", instance) if instance else ()
            wcache(made, "down", "--force", *named)
    shutil.rmtree(made.root, ignore_errors=True)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "wcache", "run", *arguments]


def env(places: Places) -> dict[str, str]:
    return {**environment(places), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}


def last_record(places: Places, instance: str = "") -> Record:
    told = load(records(places.instance(instance).runs_folder)[-1])
    assert told is not None
    return told


def report(places: Places) -> Report | None:
    try:
        with Control.connect(places.rank(), "operator") as control:
            return control.request(AskReport(), Report)
    except (NoSuchRankError, OSError):
        return None


def from_disk(model: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype)


@pytest.fixture(scope="module")
def stock(model: Path) -> Answers:
    """What transformers answers without wcache, in as many threads as the script has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return script.answers(from_disk(model, torch.bfloat16), script.prompts(model))
    finally:
        torch.set_num_threads(threads)


def test_a_script_answers_as_from_pretrained_does_also_while_its_daemon_is_killed(
    places: Places, stock: Answers, model: Path
) -> None:
    log = places.root / "script.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command("--", sys.executable, str(SCRIPT), str(model)),
            env=env(places), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline() or "null") == stock, log.read_text()
        before = report(places)
        assert before is not None
        assert len(before.leases) == 1
        os.kill(before.pid, signal.SIGKILL)  # it generates meanwhile
        assert [json.loads(process.stdout.readline()) for _ in range(2)] == [stock, stock]

        def is_back() -> bool:
            now = report(places)
            return now is not None and now.pid != before.pid and len(now.leases) == 1

        until(is_back, "a new daemon with the lease", 30)
        assert json.loads(process.stdout.readline()) == stock
        process.communicate("", timeout=60)
        assert process.returncode == 0, log.read_text()
    finally:
        process.kill()
        process.communicate()
    told = last_record(places)
    assert told.outcome == "hit"
    assert [phase.name for phase in told.phases] == ["imports", "weights", "first token"]


def test_a_fine_tune_of_the_same_layout_is_a_mismatch(
    places: Places, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = places.root / "tuned"
    shutil.copytree(model, tuned)
    weights = load_file(model / "model.safetensors")
    changed = {name: (one * 1.01).to(one.dtype) for name, one in weights.items()}
    save_file(changed, tuned / "model.safetensors", metadata={"format": "pt"})
    events = places.root / "events"
    events.touch()
    orders = Orders(on_mismatch="fail", events=events)
    for name, value in {**places.environment, **orders.environment()}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MismatchError, match=r"content: cached sha256:"):
        from_cache(tuned)
    told = [one for one in read_events(events) if one.outcome is not None]
    assert [one.outcome for one in told] == ["mismatch"]
    assert "content: cached sha256:" in told[0].reason
    shutil.rmtree(tuned)


def test_three_processes_give_the_logits_of_one(places: Places, model: Path) -> None:
    three = ("--instance", "three")
    wcache(places, "up", *three, "--model", str(model), "--tp", "3", "--dtype", "float32",
           "--device", "cpu")  # fmt: skip
    folder = places.root / "logits"
    folder.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        command(
            *three, "--on-mismatch", "fail", "--", *torchrun, "--nproc-per-node", "3", str(SCRIPT),
            str(model), str(folder),
        ),
        env=env(places), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    want = script.logits(from_disk(model, torch.float32), script.prompts(model))
    for rank in range(3):
        found = load_file(folder / f"{rank}.safetensors")["logits"]
        assert found.shape == want.shape
        assert float((found - want).abs().max()) < CLOSE
        assert torch.equal(found.argmax(-1), want.argmax(-1))
    assert float(want.abs().max()) > 1000 * CLOSE
    told = last_record(places, "three")
    assert told.outcome == "hit"
    assert {step.rank for step in told.steps if step.name == "attach"} == {0, 1, 2}
