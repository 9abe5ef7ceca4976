"""Which engine a command line starts when another program starts it."""

import pytest

from wcache.engines.wrappers import find_engine, unadapted

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "wrapper",
    [
        "",
        "env",
        "/usr/bin/env -u HF_HOME VLLM_LOGGING_LEVEL=DEBUG",
        "env VLLM_PLUGIN_FILE=/etc/serving.py",
        "numactl --cpunodebind 0 --membind=0",
        "uv run --with vllm",
        "nice -n 5 taskset -c 0-3",
        "conda run -n serving --no-capture-output",
    ],
)
@pytest.mark.parametrize("server", ["vllm serve m", "/opt/bin/python3 -m vllm serve m"])
def test_an_engine_is_found_behind_what_wraps_it(wrapper: str, server: str) -> None:
    argv = [*wrapper.split(), *server.split()]
    engine, begin = find_engine(argv)
    assert engine is not None
    assert engine.name == "vllm"
    assert argv[begin:] == server.split()


@pytest.mark.parametrize(
    "line",
    ["", "env", "env A=b true", "echo vllm serve m", "sudo vllm serve m", "uv run vllm chat"],
)
def test_what_starts_no_server_or_keeps_our_words_from_it_is_left_alone(line: str) -> None:
    assert find_engine(line.split()) == (None, 0)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("sglang serve --model-path m", "SGLang"),
        ("env A=b python3 -m sglang.launch_server --model-path m", "SGLang"),
        ("python -m vllm serve sglang", ""),
        ("python sglang.py", ""),
        ("echo sglang serve", ""),
        ("", ""),
    ],
)
def test_an_engine_without_an_adapter_is_known_by_name(line: str, name: str) -> None:
    assert unadapted(line.split()) == name
