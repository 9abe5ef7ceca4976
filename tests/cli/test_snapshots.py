"""What commands say when there is nothing to do for them, or nothing that they can do."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.snapshot import check, wcache
from tests.places import Places, publish_config
from wcache.rollout.lock import DOWN, hold

pytestmark = pytest.mark.cli

COMMANDS = [
    "up", "status", "verify", "warm", "rollback", "restart", "down", "logs", "supervise",
]  # fmt: skip
LOCKED = ["up", "down", "restart", "warm", "rollback"]
# These are about the machine and not about an instance: tests/cli/test_install.py.
ON_A_HOST = ["doctor", "install", "uninstall"]


def nothing(_: Places) -> None:
    """No file at all."""


def three_ranks(places: Places) -> None:
    from wcache.config import LayoutSection

    places.write_config(publish_config(layout=LayoutSection(tp=3)))


def three_models(places: Places) -> None:
    """Ranks that are read from a checkpoint, of which there is nothing."""
    from wcache.config import Config, LayoutSection, ModelSection

    model = ModelSection(path="/models/a", content="sha256:" + "a" * 64)
    places.write_config(Config(model=model, layout=LayoutSection(tp=3)))


def broken(places: Places) -> None:
    file = places.instance().config_file
    file.parent.mkdir(parents=True)
    file.write_text('colour = "red"\n[model]\npath = 7\n[layout]\ntp = "two"\n')


def not_toml(places: Places) -> None:
    broken(places)
    places.instance().config_file.write_text("[model\n")


def a_file(places: Places) -> None:
    (places.root / "model").write_text("not a folder")


def an_empty_folder(places: Places) -> None:
    (places.root / "model").mkdir()


def an_mxfp4_group(places: Places) -> None:
    """A Llama in bf16 with one group of experts as gpt-oss has them."""
    import torch

    from tests.checkpoints import llama_config, llama_tensors, write_checkpoint

    tensors = llama_tensors()
    for leaf, shape in (("blocks", (2, 8, 2, 16)), ("scales", (2, 8, 2))):
        name = f"model.layers.1.mlp.experts.gate_up_proj_{leaf}"
        tensors[name] = torch.zeros(shape, dtype=torch.uint8)
    write_checkpoint(places.root / "model", tensors, llama_config())


def called_default(places: Places) -> None:
    """An instance of that name from before it was refused, with a file that can not be read."""
    places.write_config(publish_config(), "default").write_text("[model\n")


Setup = Callable[[Places], None]
CASES: list[tuple[str, Setup, str]] = [
    ("help", nothing, "--help"),
    *((f"help_{command}", nothing, f"{command} --help") for command in (*COMMANDS, *ON_A_HOST)),
    ("version", nothing, "--version"),
    # Usage.
    ("usage_no_such_command", nothing, "stat"),
    ("usage_no_such_option", nothing, "up --modle x"),
    ("usage_not_a_number", nothing, "up --model x --tp two"),
    ("usage_dtype", nothing, "up --model x --dtype int8"),
    ("usage_no_model", nothing, "up --tp 8"),
    ("usage_layout", nothing, "up --model x --tp 4 --ep 3 --nnodes 3"),
    ("usage_size", nothing, "up --model x --slab-bytes 1G"),
    ("usage_warm_replace", nothing, "warm --replace --keep-old"),
    ("usage_warm_page_cache", nothing, "warm --page-cache --replace"),
    ("usage_warm_previous", three_models, "warm --previous --model x"),
    ("usage_warm_revision", three_models, "warm --revision v2"),
    ("usage_publish", nothing, "up --model x --loader publish --dtype float16"),
    ("usage_quantization", nothing, "up --model x --quantization int8"),
    ("usage_publish_fp8", nothing, "up --model x --loader publish --quantization fp8"),
    ("usage_rank", nothing, "status x"),
    ("usage_instance", nothing, "status --instance ../x"),
    ("usage_instance_default", nothing, "up --instance default --model x"),
    ("usage_instance_default_before", called_default, "up --instance default"),
    ("usage_instance_empty", three_ranks, "down --instance="),
    ("usage_two_instances", nothing, "status a:0 b:0"),
    ("usage_default_and_another", nothing, "status 0 b:0"),
    ("usage_run_nothing", nothing, "run"),
    ("usage_run_unadapted", nothing, "run --on-mismatch fail -- sglang serve --model-path x"),
    ("run_unadapted", nothing, "run -- sglang serve --model-path x"),
    ("usage_run_no_script", nothing, "run -- python nowhere.py"),
    ("usage_run_daemon", nothing, "run --instance a --mode daemon -- torchrun train.py"),
    # No configuration.
    *((f"none_{command}", nothing, command) for command in COMMANDS if command != "supervise"),
    ("none_status_named", nothing, "status --instance draft"),
    ("none_status_json", nothing, "status --json"),
    # A configuration that can not be read.
    *((f"broken_{command}", broken, command) for command in ("up", "status", "restart", "down")),
    ("broken_up_model", broken, "up --model /nowhere"),
    ("not_toml_status", not_toml, "status"),
    # Models.
    ("model_no_name", nothing, "up --device cpu --model="),
    ("model_no_name_warm", three_models, "warm --model="),
    ("model_absent", nothing, "up --device cpu --model /nowhere/model"),
    ("model_file", a_file, "up --device cpu --model ./model"),
    ("model_empty", an_empty_folder, "up --device cpu --model ./model"),
    ("model_mxfp4", an_mxfp4_group, "up --device cpu --model ./model"),
    ("model_not_cached", nothing, "up --device cpu --model org/name"),
    ("model_not_cached_revision", nothing, "up --device cpu --model org/name --revision v1"),
    ("no_gpu", nothing, "up --device cuda --model x --loader publish"),
    # Nothing runs.
    ("down_status", three_ranks, "status"),
    ("down_status_of_one", three_ranks, "status 1"),
    ("down_status_json", three_ranks, "status 2 --json"),
    ("down_out_of_range", three_ranks, "status 3"),
    ("down_down", three_ranks, "down"),
    ("down_restart", three_ranks, "restart"),
    ("down_restart_of_one", three_ranks, "restart 1"),
    ("down_verify", three_ranks, "verify"),
    ("down_verify_of_one", three_ranks, "verify 1"),
    ("down_warm", three_models, "warm --dry-run"),
    ("down_warm_published", three_ranks, "warm"),
    ("down_warm_no_previous", three_models, "warm --previous"),
    ("down_rollback", three_models, "rollback"),
    ("down_rollback_drop", three_ranks, "rollback --drop"),
    ("down_logs", three_ranks, "logs"),
    ("down_logs_named", three_ranks, "logs --instance draft"),
]


@pytest.mark.parametrize(("name", "setup", "command"), CASES, ids=[case[0] for case in CASES])
def test_the_words_are_those_of_the_snapshot(
    name: str, setup: Setup, command: str, places: Places
) -> None:
    setup(places)
    check(wcache(places, *command.split()), name, places.root)


@pytest.mark.parametrize("command", [*COMMANDS, "doctor", "run", "fingerprint"])
def test_an_empty_instance_is_not_the_default_one(command: str, places: Places) -> None:
    done = wcache(places, command, "--instance", "")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: not an instance name: ''\n")


@pytest.mark.parametrize("command", LOCKED)
def test_a_second_command_is_told_who_is_at_work(command: str, places: Places) -> None:
    three_ranks(places)
    lock = places.instance().lock_file
    lock.parent.mkdir(parents=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(f"{os.getpid()} wcache up\n")
        file.flush()
        done = wcache(places, command)
    assert f"pid {os.getpid()}" in done.stderr
    check(done, f"locked_{command}", places.root)


def test_a_down_that_is_at_work_is_not_called_safe_to_end(places: Places) -> None:
    three_ranks(places)
    with hold(places.instance(), DOWN):
        done = wcache(places, "up")
    assert done.code == 75
    assert f"another wcache down is at work (pid {os.getpid()})" in done.stderr
    assert "safe" not in done.stderr
    assert "ended half-way" in done.stderr


def test_a_lock_of_a_command_that_was_killed_is_no_lock(places: Places) -> None:
    three_ranks(places)
    lock = places.instance().lock_file
    lock.parent.mkdir(parents=True)
    lock.write_text("1 wcache up\n")
    assert wcache(places, "down").code == 0


def test_every_snapshot_belongs_to_a_test() -> None:
    from tests.cli.snapshot import SNAPSHOTS

    names = {case[0] for case in CASES} | {f"locked_{name}" for name in LOCKED}
    elsewhere = ("fingerprint_", "job_", "install", "uninstall")
    kept = {file.stem for file in SNAPSHOTS.glob("*.txt") if not file.stem.startswith(elsewhere)}
    assert kept == names


def test_a_reader_that_leaves_is_no_error(places: Places) -> None:
    import subprocess
    import sys

    from tests.cli.snapshot import environment

    three_ranks(places)
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-m", "wcache", "status"],
        env=environment(places),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert "Traceback" not in ran.stderr
    assert "Broken" not in ran.stderr


def test_nothing_is_written_before_everything_is_checked(places: Places, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    done = wcache(places, "up", "--device", "cpu", "--model", str(tmp_path / "model"))
    assert done.code == 78
    assert not places.instance().config_file.exists()
