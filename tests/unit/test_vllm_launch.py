"""What wcache run makes of vLLM's command lines, without a vLLM."""

import re

import pytest

from wcache.config import Config, LayoutSection, Loader, MemorySection, ModelSection
from wcache.engines import engine_for
from wcache.engines.interface import Probe, Sign, Wish
from wcache.engines.orders import Orders
from wcache.engines.vllm import versions
from wcache.engines.vllm.launch import Vllm
from wcache.errors import UsageError, WcacheError
from wcache.fingerprint import wanted_by
from wcache.rollout.bring_up import asked_for
from wcache.rollout.wanted import Args

pytestmark = pytest.mark.unit

VLLM = Vllm()
API = "vllm.entrypoints.openai.api_server"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_PLUGINS", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "line",
    [
        "vllm serve m",
        "/opt/venv/bin/vllm serve m --port 1",
        "python -m vllm.entrypoints.openai.api_server --model m",
        "python3.12 -u -X dev -m vllm.entrypoints.cli.main serve m",
        "python3 -m vllm serve m",
        "/usr/bin/python3 /opt/venv/bin/vllm serve m",
    ],
)
def test_every_way_to_start_the_server_is_recognised(line: str) -> None:
    engine = engine_for(line.split())
    assert engine is not None
    assert engine.name == "vllm"
    assert engine.wish(line.split()).model == "m"


@pytest.mark.parametrize(
    "line",
    ["vllm bench serve m", "vllm", "vllm-serve m", "python vllm_script.py", "python -m vllm chat",
     "python -m json.tool", "python", "python -X", "echo vllm serve"],
)  # fmt: skip
def test_nothing_else_is_taken_for_the_server(line: str) -> None:
    assert not VLLM.recognises(line.split())


@pytest.mark.parametrize(
    "options",
    ["--tensor-parallel-size 4 --pipeline-parallel-size 2 --data-parallel-size 3",
     "--tensor_parallel_size=4 --pipeline_parallel_size=2 --data_parallel_size=3",
     "-tp 4 -pp=2 -dp 3"],
)  # fmt: skip
def test_sizes_are_read_in_every_spelling(options: str) -> None:
    wish = VLLM.wish(["vllm", "serve", "m", *options.split(), "--dtype", "bfloat16"])
    assert wish == Wish(model="m", tp=4, pp=2, dp=3, dtype="bfloat16")
    assert wish.ranks == 24


@pytest.mark.parametrize(
    "options", ["--tensor-p 4 --por 81 --load-f wcache -qfp8", "--tensor_par=4 --por=81 -q fp8"]
)
def test_options_may_be_shortened_as_vllms_parser_takes_them(options: str) -> None:
    command = ["vllm", "serve", "m", *options.split()]
    assert VLLM.wish(command) == Wish(model="m", tp=4, quantization="fp8")
    probe = VLLM.probe(command)
    assert isinstance(probe, Probe)
    assert probe.port == 81
    assert VLLM.launch(command, Orders()).argv[-2:] == (
        ("--load-format", "wcache") if "load" not in options else ("wcache", "-qfp8")
    )


@pytest.mark.parametrize("options", ["--load-f auto", "--load-for=auto", "--enable-epl"])
def test_a_shortened_option_is_not_overridden_and_refused_as_the_whole_one_is(options: str) -> None:
    with pytest.raises(UsageError, match=r"--load-format auto is given|--enable-eplb does not go"):
        VLLM.launch(["vllm", "serve", "m", *options.split()], Orders())


def test_the_last_of_two_values_counts_as_it_does_for_vllm() -> None:
    assert VLLM.wish(["vllm", "serve", "m", "-tp", "2", "-tp", "4"]).tp == 4


@pytest.mark.parametrize("options", ["-tp zero", "-tp 0", "-tp -1", "-tp"])
def test_a_size_that_is_no_number_is_named(options: str) -> None:
    with pytest.raises(UsageError, match="--tensor-parallel-size"):
        VLLM.wish(["vllm", "serve", "m", *options.split()])


def test_client_mode_adds_the_load_format_and_nothing_else() -> None:
    command = ["vllm", "serve", "m", "--port", "80", "--max-model-len", "512"]
    launch = VLLM.launch(command, Orders(instance="a", on_mismatch="fail"))
    assert launch.argv == (*command, "--load-format", "wcache")
    assert launch.environment == {"WCACHE_INSTANCE": "a", "WCACHE_ON_MISMATCH": "fail"}


def test_the_load_format_of_wcache_may_be_there_already() -> None:
    command = ("vllm", "serve", "m", "--load_format=wcache")
    assert VLLM.launch(command, Orders()).argv == command


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--load-format safetensors", "--load-format safetensors"),
        ("--load_format=auto", "--load-format auto"),
        ("--enable-sleep-mode", "--enable-sleep-mode"),
        ("--enable-eplb", "--enable-eplb"),
        ("--cpu-offload-gb 4", "--cpu-offload-gb"),
        ("--weight-transfer-config {}", "--weight-transfer-config"),
        ("--weight-transfer-config.backend nccl", "--weight-transfer-config"),
        ("--config serve.yaml", "--config"),
    ],
)
def test_what_contradicts_the_cache_is_named(options: str, named: str) -> None:
    with pytest.raises(UsageError, match=re.escape(named)) as raised:
        VLLM.launch(["vllm", "serve", "m", *options.split()], Orders())
    assert raised.value.hint


def test_no_offloading_is_no_contradiction() -> None:
    assert VLLM.launch(["vllm", "serve", "m", "--cpu-offload-gb", "0"], Orders()).argv


@pytest.mark.parametrize(("listed", "way_out"), [("", "wcache"), ("lora", "lora,wcache")])
def test_a_disabled_plugin_is_found_before_the_start(
    listed: str, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", listed)
    with pytest.raises(UsageError, match="VLLM_PLUGINS") as raised:
        VLLM.launch(["vllm", "serve", "m"], Orders())
    assert f"VLLM_PLUGINS={way_out}," in raised.value.hint


@pytest.mark.parametrize("value", ["0", "0.0", "0."])
def test_offloading_nothing_is_let_pass(value: str) -> None:
    assert VLLM.launch(["vllm", "serve", "m", "--cpu-offload-gb", value], Orders()).argv


def test_an_enabled_plugin_is_let_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora, wcache")
    assert VLLM.launch(["vllm", "serve", "m"], Orders()).argv


def test_the_probe_asks_for_one_token_where_the_server_will_be() -> None:
    line = "vllm serve m --host ::1 --port 81 --served-model-name a b --api-key k"
    body = {"model": "a", "prompt": "1", "max_tokens": 1, "temperature": 0}
    assert VLLM.probe(line.split()) == Probe(
        host="::1", port=81, path="/v1/completions", body=body,
        headers={"Authorization": "Bearer k"},
    )  # fmt: skip
    other = VLLM.probe(["python", "-m", API, "--model", "m"])
    assert isinstance(other, Probe)
    assert (other.port, other.body["model"]) == (8000, "m")


@pytest.mark.parametrize(
    "options", ["--uds /run/x", "--headless", "--config x.yaml", "--ssl-keyfile k",
                "--runner pooling"]
)  # fmt: skip
def test_a_server_that_can_not_be_asked_over_tcp_is_known_by_its_log(options: str) -> None:
    phase = "init" if options == "--headless" else "server"
    assert VLLM.probe(["vllm", "serve", "m", *options.split()]) == Sign(phase)


def test_a_server_whose_model_is_not_known_is_asked_without_its_name() -> None:
    probe = VLLM.probe(["vllm", "serve", "--port", "81", "m"])
    assert isinstance(probe, Probe)
    assert probe.port == 81
    assert "model" not in probe.body


def test_the_marks_know_the_lines_of_a_real_start() -> None:
    log = [
        "(EngineCore pid=9260) INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with …",
        "(Worker pid=9347) INFO [parallel_state.py:2350] rank 0 in world size 1 is assigned as DP",
        "(EngineCore pid=1) INFO [kv_cache_utils.py:2327] CPU KV cache size: 46,592 tokens, Max",
        "(EngineCore pid=9260) INFO [core.py:402] init engine (profile, create kv cache, warmup",
        "(APIServer pid=1) INFO:     Application startup complete.",
    ]
    found = [mark.phase for line in log for mark in VLLM.marks if mark.pattern.search(line)]
    assert found == ["imports", "distributed", "profile", "init", "server"]


@pytest.mark.parametrize("version", ["0.30.0", "0.32.0+cpu", "0.33.1rc1", "1.0.0"])
def test_versions_in_range(version: str) -> None:
    assert versions.check(version) >= versions.FIRST


@pytest.mark.parametrize("version", ["0.29.9", "0.9.1", "dev", ""])
def test_a_version_out_of_range_is_named(version: str) -> None:
    with pytest.raises(WcacheError) as raised:
        versions.check(version)
    assert version in raised.value.message
    assert "0.30" in raised.value.message + raised.value.hint


@pytest.mark.parametrize(("dtype", "wanted"), [("auto", None), ("float16", "float16")])
def test_of_vllms_own_loader_only_a_dtype_that_was_named_is_wanted(
    dtype: str, wanted: str | None
) -> None:
    model = ModelSection(path="/m", loader="vllm", dtype=dtype)  # type: ignore[arg-type]  # a Literal
    found = wanted_by(Config(model=model), 0)
    assert (found.loader, found.dtype, found.tp_size) == ("vllm", wanted, 1)


@pytest.mark.parametrize(
    ("layout", "device"),
    [
        (LayoutSection(tp=2, ep=2), "cpu"),
        (LayoutSection(tp=2, ep=2), "cuda"),
    ],
)
def test_a_layout_that_no_rank_can_load_alone_is_refused(
    layout: LayoutSection, device: str
) -> None:
    from wcache.engines.vllm.alone import check_layout

    memory = MemorySection(device=device, devices=("GPU-1", "GPU-2"))  # type: ignore[arg-type]  # a Literal
    config = Config(model=ModelSection(path="/m", loader="vllm"), layout=layout, memory=memory)
    with pytest.raises(UsageError) as raised:
        check_layout(config)
    assert "--loader publish" in raised.value.hint


@pytest.mark.parametrize(
    ("version", "said"),
    [("0.30.1", ""), ("0.33.7+cpu", ""), ("0.34.0", "later than 0.33"), ("1.0", "1.0 is")],
)
def test_a_version_that_nobody_has_tried_is_told_of(version: str, said: str) -> None:
    told = versions.untried(version)
    assert said in told
    assert bool(told) == bool(said)


@pytest.mark.parametrize(
    ("configured", "options", "kept", "dtype"),
    [
        ("vllm", (), "vllm", "float16"),
        ("vllm", ("--dtype", "half"), "vllm", "float16"),
        ("vllm", ("--dtype", "float"), "vllm", "float32"),
        ("publish", ("--dtype", "half"), "publish", None),
        ("safetensors", (), "publish", None),
    ],
)
def test_daemon_mode_keeps_a_loader_whose_weights_vllm_takes(
    configured: Loader, options: tuple[str, ...], kept: Loader, dtype: str | None
) -> None:
    """After a reboot nobody else would fill the ranks."""
    old = Config(model=ModelSection(path="/models/m", loader=configured, dtype="float16"))
    wish = VLLM.wish(["vllm", "serve", "/models/m", "-tp", "2", *options])
    args = asked_for(VLLM, wish, old)
    assert (args.model, args.loader, args.dtype, args.tp) == ("/models/m", kept, dtype, 2)


def test_daemon_mode_takes_the_dtype_of_one_model_for_no_other() -> None:
    named = ModelSection(path="/hub/snapshot", hub_id="org/m", loader="vllm", dtype="float16")
    for model, dtype in (("org/m", "float16"), ("/hub/snapshot/", "float16"), ("org/n", None)):
        wish = VLLM.wish(["vllm", "serve", model])
        assert asked_for(VLLM, wish, Config(model=named)).dtype == dtype


def test_daemon_mode_has_the_first_engine_publish_where_nothing_is_configured() -> None:
    wish = VLLM.wish(["vllm", "serve", "/models/m", "--dtype", "float16"])
    assert asked_for(VLLM, wish, None) == Args(
        model="/models/m", loader="publish", tp=1, pp=1, dp=1
    )
