"""``wcache run`` around scripts: marks, exit codes, and what several processes agree on."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import write_llama
from tests.places import Places
from tests.processes import Store, end
from tests.tiny_daemon import TinyDaemon
from tests.weights import Holder, cached
from wcache.checkpoint import identify, open_checkpoint
from wcache.engines.orders import Orders
from wcache.fingerprint import Fingerprint
from wcache.run.timeline import Record, load, read_events, records

pytest.importorskip("transformers")
pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parent / "scripts.py"
LIMIT_S = 100.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model", tie_word_embeddings=False)


@pytest.fixture
def daemon(places: Places, model: Path) -> Iterator[TinyDaemon]:
    """Serves the whole model as rank 0."""
    made = TinyDaemon(places.rank())
    content = identify(open_checkpoint(model)).digest
    fingerprint = Fingerprint(
        model=str(model), content=content, architecture="LlamaForCausalLM", tp_size=1, dp_size=1
    )
    made.serve(*cached(Holder(load_file(model / "model.safetensors")), fingerprint=fingerprint))
    made.start()
    yield made
    made.close()


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1", **more}


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "wcache", "run", *arguments],
        env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def record(places: Places) -> Record:
    found = records(places.instance().runs_folder)
    assert len(found) == 1
    told = load(found[0])
    assert told is not None
    return told


def test_a_script_is_followed_to_its_mark_and_to_its_end(
    places: Places, daemon: TinyDaemon, model: Path
) -> None:
    done = run("--", sys.executable, str(SCRIPT), str(model), "7")
    assert done.returncode == 7, done.stderr
    assert len(json.loads(done.stdout)["tokens"][0]) == 12
    told = record(places)
    assert (told.engine, told.outcome, told.exit_code) == ("transformers", "hit", 7)
    assert [phase.name for phase in told.phases] == ["imports", "weights", "first token"]
    assert {phase.source for phase in told.phases} == {"event"}
    assert [step.name for step in told.steps] == ["fetch", "map", "build", "bind", "attach"]
    assert told.ready_s == told.phases[-1].end_s
    assert "hit: rank 0: attached to generation 1" in done.stderr


_UNMARKED = """
from wcache.engines.orders import Orders, report
orders = Orders.given()
report(orders, "imports", rank=0)
report(orders, "outcome", rank=0, outcome="hit", reason="attached")
"""


def test_a_script_that_never_says_that_it_is_ready_has_no_such_phase(places: Places) -> None:
    done = run("--", sys.executable, "-c", _UNMARKED)
    assert done.returncode == 0, done.stderr
    told = record(places)
    assert [phase.name for phase in told.phases] == ["imports", "weights"]
    assert told.ready_s is None
    # Shown at its end, as it could not be shown before.
    assert [line.split()[0] for line in done.stderr.splitlines()] == [
        "hit:", "PHASE", "imports", "weights",
    ]  # fmt: skip


def test_a_script_is_known_by_the_command_that_was_given_without_its_secrets(
    places: Places,
) -> None:
    script = "import os; print(os.environ['WCACHE_COMMAND'])"
    done = run("--", sys.executable, "-c", script, "--api-key", "hush", "--port", "8000")
    assert done.stdout == f"{sys.executable} -c {script} --api-key *** --port 8000\n"
    assert "hush" not in " ".join(record(places).command)


def test_a_script_that_never_asks_runs_as_it_would_and_nothing_is_claimed(places: Places) -> None:
    done = run("--", sys.executable, "-c", "print('mine'); raise SystemExit(5)")
    assert (done.returncode, done.stdout) == (5, "mine\n")
    assert done.stderr == "no model was made by from_cache(), and no engine told of its weights\n"
    told = record(places)
    assert (told.outcome, told.reason, told.phases) == (None, "", ())


def test_a_server_that_ends_before_it_asks_is_no_script_without_from_cache(
    places: Places, tmp_path: Path
) -> None:
    server = tmp_path / "vllm"
    server.write_text("#!/bin/sh\nexit 9\n")
    server.chmod(0o755)
    done = run("--", str(server), "serve", "m", "--port", "1")
    assert done.returncode == 9
    assert done.stderr == "the engine ended before it asked for weights: its own log says why\n"


def test_a_server_that_takes_too_long_did_not_end_by_itself(places: Places, tmp_path: Path) -> None:
    server = tmp_path / "vllm"
    server.write_text("#!/bin/sh\nexec sleep 600\n")
    server.chmod(0o755)
    done = run("--ready-timeout", "1", "--", str(server), "serve", "m", "--port", "1")
    assert done.returncode == 3
    assert done.stderr.startswith("error: the engine gave no token within 1 s, and was ended:")


def test_a_server_that_is_killed_is_said_to_be(places: Places, tmp_path: Path) -> None:
    """Its own log says nothing of it."""
    server = tmp_path / "vllm"
    server.write_text("#!/bin/sh\nkill -9 $$\n")
    server.chmod(0o755)
    done = run("--", str(server), "serve", "m", "--port", "1")
    assert done.returncode == 137
    assert done.stderr == (
        "the engine ended before it asked for weights\nthe engine was ended by SIGKILL\n"
    )


def test_a_script_that_can_not_use_what_it_got_has_asked(
    places: Places, daemon: TinyDaemon, model: Path
) -> None:
    take = (
        "import sys; from wcache.engines.transformers import from_cache as take; take(num_layers=1)"
    )
    done = run("--", sys.executable, "-c", take)
    assert done.returncode == 1
    assert "UsageError: llama has no setting num_layers" in done.stderr
    assert "no model was made by" not in done.stderr
    assert (
        "the cache was asked for weights, and none were taken: the engine's own log" in done.stderr
    )


def test_mode_off_leaves_a_script_and_its_environment_alone(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = "import json, os, sys; print(json.dumps([sys.argv, dict(os.environ)]))"
    command = [sys.executable, "-c", show, "--load-format", "x"]
    plain = subprocess.run(command, env=environment(), capture_output=True, check=True)
    done = run("--mode", "off", "--", *command)
    assert json.loads(done.stdout) == json.loads(plain.stdout)
    assert record(places).outcome == "off"


def test_mode_off_is_ready_when_it_has_started(places: Places, tmp_path: Path) -> None:
    """A script's own mark is heard by nobody then, and its unit would wait for it."""
    store = Store(tmp_path / "notify")
    command = ["run", "--mode", "off", "--", sys.executable, "-c", "input()"]
    started = subprocess.Popen(
        [sys.executable, "-m", "wcache", *command],
        env=environment(NOTIFY_SOCKET=str(store.path)), stdin=subprocess.PIPE,
    )  # fmt: skip
    try:
        store.serve(lambda: "READY=1" in store.said)
    finally:
        assert started.stdin is not None
        started.stdin.close()  # ends the script
        end(started, signal.SIGTERM)
        store.close()


def group(size: int, command: Sequence[str], folder: Path, **more: str) -> list[tuple[int, str]]:
    """Starts ``size`` interpreters as torchrun does; exit status and output of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    told = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **more}
    started = []
    for rank in map(str, range(size)):
        with (folder / rank).open("wb") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    env=environment(**told, RANK=rank), stdout=log, stderr=log,
                )
            )  # fmt: skip
    try:
        codes = [process.wait(LIMIT_S) for process in started]
    finally:
        for process in started:
            end(process)
    return [(code, (folder / str(rank)).read_text()) for rank, code in enumerate(codes)]


def test_a_process_whose_neighbours_have_no_weights_reads_its_shard_with_them(
    places: Places, model: Path, tmp_path: Path
) -> None:
    """Rank 0 could attach, and then would be one model together with what others have read."""
    made = TinyDaemon(places.rank())
    content = identify(open_checkpoint(model)).digest
    fingerprint = Fingerprint(model=str(model), content=content, tp_size=3, tp_rank=0, dp_size=1)
    made.serve(*cached(Holder(load_file(model / "model.safetensors")), fingerprint=fingerprint))
    made.start()
    events = tmp_path / "events"
    events.touch()
    try:
        orders = Orders(events=events)
        ended = group(3, [str(SCRIPT), str(model)], tmp_path, **orders.environment())
    finally:
        made.close()
    assert [code for code, _ in ended] == [0, 0, 0], ended
    tokens = {json.dumps(json.loads(text.splitlines()[-1])["tokens"]) for _, text in ended}
    assert len(tokens) == 1
    told = {one.rank: one for one in read_events(events) if one.outcome is not None}
    assert {one.outcome for one in told.values()} == {"miss"}
    assert told[0].reason == ("processes 1, 2 of 3 can not use the cached weights, so none does")
    assert told[1].reason == "no daemon answers for rank 1"


_TAKE_ANYTHING = """
import atexit
import torch.distributed
from wcache.engines.transformers import from_cache
atexit.register(lambda: print("in a group at the end:", torch.distributed.is_initialized()))
from_cache()
"""


def test_shards_of_two_models_are_no_model(places: Places, tmp_path: Path) -> None:
    """As they are while ranks are switched to other weights one after the other."""
    daemons = [TinyDaemon(places.rank(rank)) for rank in range(3)]
    for rank, daemon in enumerate(daemons):
        content = "sha256:old" if rank < 2 else "sha256:new"
        fingerprint = Fingerprint(
            model="m", content=content, loader="safetensors", tp_size=3, tp_rank=rank, dp_size=1
        )
        module = Holder({"weight": torch.ones(3)})
        daemon.serve(*cached(module, fingerprint=fingerprint))
        daemon.start()
    try:
        ended = group(3, ["-c", _TAKE_ANYTHING], tmp_path)
    finally:
        for daemon in daemons:
            daemon.close()
    for code, text in ended:
        assert code == 1
        assert "MismatchError: process 2 of 3 would have other weights than process 0" in text
        # A group's threads that outlive Python end the process with SIGABRT now and then.
        assert "in a group at the end: False" in text


_TAKE = """
import os, sys
from wcache.engines.transformers import from_cache
from_cache(sys.argv[1] if os.environ["RANK"] != "2" else "/nowhere", fallback=True)
"""


def test_no_process_reads_the_disk_where_one_can_not(
    places: Places, model: Path, tmp_path: Path
) -> None:
    """As on a machine that lacks the folder; others would wait for it in their first exchange."""
    ended = group(3, ["-c", _TAKE, str(model)], tmp_path)
    assert [code for code, _ in ended] == [1, 1, 1], ended
    for _, text in ended[:2]:
        assert "NotReadyError: process 2 of 3 can not read the disk, so none does" in text
    assert "nothing can be read instead: no such checkpoint: /nowhere" in ended[2][1]
    assert "CheckpointError: no such checkpoint: /nowhere" in ended[2][1]
