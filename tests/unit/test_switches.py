"""Which settings of an engine become part of a fingerprint."""

import os
import re

import pytest

from wcache import switches
from wcache.errors import UsageError
from wcache.switches import (
    ENGINES,
    from_arguments,
    from_environment,
    set_here,
    without_secrets,
)

pytestmark = pytest.mark.unit

KNOWN = [(engine, one.name) for engine, table in ENGINES.items() for one in table.variables]
OPTIONS = [(engine, one.name) for engine, table in ENGINES.items() for one in table.options]


@pytest.mark.parametrize(("engine", "name"), KNOWN)
def test_every_variable_of_the_table_is_taken(engine: str, name: str) -> None:
    assert from_environment(engine, {name: "1"}) == {name: "1"}


@pytest.mark.parametrize(("engine", "name"), OPTIONS)
def test_every_option_of_the_table_is_taken(engine: str, name: str) -> None:
    assert from_arguments(engine, ["serve", name, "x", "--port", "1"]) == {name: "x"}


def test_every_entry_says_why_in_a_line() -> None:
    for table in ENGINES.values():
        entries = (*table.variables, *table.options)
        assert len({one.name for one in entries}) == len(entries)
        for one in entries:
            assert re.fullmatch(r"[A-Za-z].{5,80}[^.\n]", one.why), one


def test_a_variable_that_nobody_knows_is_taken() -> None:
    assert from_environment("vllm", {"VLLM_NEW_IN_0_99": ""}) == {"VLLM_NEW_IN_0_99": ""}
    assert from_environment("sglang", {"SGL_OLD": "1"}) == {"SGL_OLD": "1"}


@pytest.mark.parametrize(
    "name",
    ["VLLM_LOGGING_LEVEL", "VLLM_PORT", "VLLM_HOST_IP", "VLLM_CACHE_ROOT", "VLLM_ENGINE_TIMEOUT_S",
     "VLLM_DP_RANK", "VLLM_API_KEY", "VLLM_HF_TOKEN", "VLLM_WORKER_MULTIPROC_METHOD",
     "VLLM_OMP_NUM_THREADS_SET_BY_VLLM"],
)  # fmt: skip
def test_where_things_go_and_secrets_are_passed_over(name: str) -> None:
    assert from_environment("vllm", {name: "x"}) == {}


def test_a_part_of_a_harmless_name_makes_no_other_harmless() -> None:
    names = ["VLLM_MOE_LOG_LAYOUT", "VLLM_TIMEOUT_KERNEL", "SGLANG_DEBUG_REVERT_PR",
             "SGLANG_USE_AITER_FP8_PER_TOKEN", "VLLM_MONKEY_PATCH"]  # fmt: skip
    assert sorted(from_environment(None, dict.fromkeys(names, "1"))) == sorted(names)


def test_only_the_engines_own_variables_are_taken() -> None:
    environment = {"VLLM_USE_DEEP_GEMM": "1", "SGLANG_USE_AITER": "1", "PATH": "/bin"}
    assert from_environment("vllm", environment) == {"VLLM_USE_DEEP_GEMM": "1"}
    assert from_environment("transformers", environment) == {}


@pytest.mark.parametrize("engine", [None, "some-fork-of-vllm"])
def test_an_engine_that_is_not_known_may_read_any_of_them(engine: str | None) -> None:
    environment = {"VLLM_USE_DEEP_GEMM": "1", "SGLANG_USE_AITER": "1", "PATH": "/bin"}
    assert set(from_environment(engine, environment)) == {"VLLM_USE_DEEP_GEMM", "SGLANG_USE_AITER"}


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--moe-backend", "triton"], {"--moe-backend": "triton"}),
        (["--moe_backend=triton"], {"--moe-backend": "triton"}),
        (["--enable-eplb", "--port", "8000"], {"--enable-eplb": "true"}),
        (["--enable-eplb"], {"--enable-eplb": "true"}),
        (["--dtype", "half", "--dtype", "bfloat16"], {"--dtype": "bfloat16"}),
        (["--kernel-config.moe_backend", "x"], {"--kernel-config.moe-backend": "x"}),
        (["--some-new-moe-switch", "1"], {"--some-new-moe-switch": "1"}),
        (["--hf-token", "secret", "--quant-api-key", "secret", "--port", "1"], {}),
        (["--tensor-parallel-size", "2", "model", "--"], {}),
        ([], {}),
    ],
)  # fmt: skip
def test_options_are_read_as_an_engine_would(arguments: list[str], found: dict[str, str]) -> None:
    assert from_arguments("vllm", arguments) == found


def test_settings_are_told_beside_the_environment() -> None:
    found = set_here(
        "sglang",
        {"moe_runner_backend": "triton", "ep_num_redundant_experts": 0, "torchao_config": None},
        environment={"SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "1"},
    )
    assert found == {
        "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "1",
        "moe_runner_backend": "triton",
        "ep_num_redundant_experts": "0",
    }


@pytest.mark.parametrize("value", ["x" * 100_000, "\udcff"])
def test_a_value_that_can_not_be_told_is_told_by_its_digest(value: str) -> None:
    (told,) = from_environment("vllm", {"VLLM_X": value}).values()
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", told)
    (other,) = from_environment("vllm", {"VLLM_X": value + "y"}).values()
    assert told != other


def test_a_name_that_no_engine_could_read_is_passed_over() -> None:
    assert from_environment("vllm", {"VLLM_\udcff": "1", "VLLM_" + "X" * 200: "1"}) == {}


@pytest.mark.parametrize("name", ["", "x" * 200, "\udcff"])
def test_a_setting_without_a_usable_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="not the name of a switch"):
        set_here("vllm", {name: "1"}, environment={})


def test_more_switches_than_a_fingerprint_takes_are_refused() -> None:
    many = {f"VLLM_X{number}": "1" for number in range(switches.MAX_SWITCHES + 1)}
    with pytest.raises(UsageError, match="257 switches are set, a fingerprint takes 256"):
        set_here("vllm", environment=many)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--api-key", "k", "--port", "1"], ["--api-key", "***", "--port", "1"]),
        (["--api-key=k"], ["--api-key=***"]),
        (["--api-key", "--port", "1"], ["--api-key", "--port", "1"]),
        (["env", "HF_TOKEN=t", "vllm"], ["env", "HF_TOKEN=***", "vllm"]),
        (["--hf_token", "t", "model"], ["--hf_token", "***", "model"]),
        (["vllm", "serve", "key=value"], ["vllm", "serve", "key=***"]),
        (["python", os.fsdecode(b"\xff.py")], ["python", "?.py"]),
    ],
)
def test_a_command_line_is_told_without_its_secrets(arguments: list[str], told: list[str]) -> None:
    assert without_secrets(arguments) == told
