"""What wcache run makes of Python commands: scripts, modules, torchrun, accelerate."""

from pathlib import Path

import pytest

from tests.places import Places, publish_config
from wcache.engines import engine_for
from wcache.engines.interface import Engine, Wish
from wcache.engines.orders import Orders
from wcache.engines.python import Program, program_of
from wcache.engines.transformers.launch import Transformers
from wcache.errors import UsageError
from wcache.output import Output
from wcache.rollout.bring_up import bring_up

pytestmark = pytest.mark.unit

SCRIPTS: Engine = Transformers()


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("python a.py -m b", Program(script="a.py", rest=("-m", "b"))),
        ("/usr/bin/python3.12 -u -X dev -W error a.py", Program(script="a.py")),
        ("python -Xdev -Werror a.py b", Program(script="a.py", rest=("b",))),
        ("python3 -m pkg.mod --x 1", Program(module="pkg.mod", rest=("--x", "1"))),
        ("python -um pkg x", Program(module="pkg", rest=("x",))),
        ("python -mpkg", Program(module="pkg")),
        ("python -c code a.py", Program(rest=("a.py",))),
        ("python --check-hash-based-pycs always a.py", Program(script="a.py")),
        ("python - a", Program(script="-", rest=("a",))),
    ],
)
def test_the_program_of_an_interpreter_is_found(line: str, program: Program) -> None:
    assert program_of(line.split()) == program


@pytest.mark.parametrize(
    "line", ["", "python", "python -V", "python -X", "python -m", "pythonic a"]
)
def test_no_program_is_made_up(line: str) -> None:
    assert program_of(line.split()) is None


@pytest.mark.parametrize(
    "line",
    ["python a.py", "python3.12 -m pkg", "python -c print()", "torchrun a.py", "./serve.py --x",
     "/opt/venv/bin/torchrun --nproc-per-node 2 a.py", "python -m torch.distributed.run a.py",
     "python /opt/venv/bin/torchrun a.py", "accelerate launch a.py"],
)  # fmt: skip
def test_every_way_to_start_a_script_is_recognised(line: str) -> None:
    engine = engine_for(line.split())
    assert engine is not None
    assert engine.name == "transformers"


@pytest.mark.parametrize("line", ["", "python", "bash a.sh", "accelerate config", "echo a.py"])
def test_nothing_else_is_taken_for_a_script(line: str) -> None:
    assert engine_for(line.split()) is None


def test_vllm_is_asked_first() -> None:
    engine = engine_for(["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"])
    assert engine is not None
    assert engine.name == "vllm"


@pytest.mark.parametrize(
    ("line", "tp"),
    [
        ("python a.py", 1),
        ("torchrun a.py --nproc-per-node 4", 1),
        ("torchrun --standalone --nproc-per-node 4 a.py", 4),
        ("torchrun --nproc_per_node=4 --nnodes 2 a.py", 8),
        ("torchrun --nnodes=2:4 --nproc-per-node=2 a.py", 4),
        ("python -m torch.distributed.run --nproc-per-node 3 -m pkg", 3),
        ("accelerate launch --num_processes 5 a.py", 5),
    ],
)
def test_processes_are_counted_and_the_model_is_not_known(line: str, tp: int) -> None:
    assert SCRIPTS.wish(line.split()) == Wish(tp=tp)


@pytest.mark.parametrize("number", ["0", "two", "-1", ""])
def test_a_number_of_processes_that_is_none_is_named(number: str) -> None:
    with pytest.raises(UsageError, match="--nproc-per-node is"):
        SCRIPTS.wish(["torchrun", f"--nproc-per-node={number}", "a.py"])


def test_orders_go_by_the_environment_alone(tmp_path: Path) -> None:
    script = tmp_path / "a.py"
    script.touch()
    command = ("python", str(script), "--load-format", "auto")
    orders = Orders(instance="a", on_mismatch="fail")
    launch = SCRIPTS.launch(command, orders)
    assert launch.argv == command
    assert launch.environment == orders.environment()
    assert SCRIPTS.probe(command) is None


def test_a_script_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"no such script: nowhere/a\.py"):
        SCRIPTS.launch(["python", "nowhere/a.py"], Orders())
    SCRIPTS.launch(["python", "-"], Orders())
    SCRIPTS.launch(["python", "-m", "pkg"], Orders())


def test_daemon_mode_needs_a_model_that_somebody_has_named(places: Places) -> None:
    with pytest.raises(UsageError) as raised:
        bring_up(SCRIPTS, Wish(tp=2), places.instance("draft"), Output())
    assert "does not say which model it takes" in raised.value.message
    assert raised.value.hint.startswith("wcache up --instance draft --model …")


def test_other_processes_than_ranks_are_told_of_before_anything_is_loaded(
    places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    from wcache.rollout.bring_up import check_configured

    places.write_config(publish_config())
    check_configured(Wish(tp=3), places.instance(), Output())
    assert capsys.readouterr().err == (
        "warning: the command starts 3 processes, and 1 rank is configured\n"
    )
    check_configured(Wish(), places.instance(), Output())
    assert capsys.readouterr().err == ""
