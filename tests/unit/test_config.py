"""The configuration file: every fault listed, and written whole or not at all."""

import os
import stat
from pathlib import Path

import msgspec
import pytest

from wcache.config import (
    MAX_CONFIG_BYTES,
    AccessSection,
    Config,
    LayoutSection,
    MemorySection,
    ModelSection,
    check_config,
    load_config,
    parse_config,
    save_config,
    write_file,
)
from wcache.errors import ConfigError, ExitCode

pytestmark = pytest.mark.unit

FULL = Config(
    model=ModelSection(
        path="/models/a", hub_id="org/a", revision="0" * 40, content="sha256:aa", dtype="bfloat16"
    ),
    layout=LayoutSection(tp=2, nnodes=2, node_rank=1),
    memory=MemorySection(device="cuda", devices=("GPU-0",), slab_bytes=2 << 20, hugepages=True),
    access=AccessSection(group="root", uids=(1000, 1001), publishers=(1002,)),
)


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text.encode(), source="x.toml")
    assert caught.value.exit_code == ExitCode.CONFIGURATION
    assert all(line.startswith("x.toml: ") for line in caught.value.problems)
    return [line.removeprefix("x.toml: ") for line in caught.value.problems]


@pytest.mark.parametrize("config", [FULL, Config(model=ModelSection(path="/models/a"))])
def test_what_is_saved_is_what_is_loaded(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "new" / "wcache.toml"
    save_config(config, path)
    assert load_config(path) == config
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_every_fault_of_every_section_is_listed_at_once() -> None:
    found = problems(
        """
        version = 2
        colour = "red"
        [model]
        path = 7
        dtype = "int3"
        [layout]
        tp = "two"
        tq = 1
        [memory]
        devices = "GPU-0"
        [access]
        uids = ["root"]
        """
    )
    fields = sorted(line.split(":")[0] for line in found)
    assert fields == [
        "access.uids", "colour", "layout.tp", "layout.tq", "memory.devices", "model.dtype",
        "model.path", "version",
    ]  # fmt: skip
    assert "colour: unknown key" in found
    assert "layout.tq: unknown key" in found


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "model: missing"),
        ("[model]", "model.path: missing"),
        ("version = 2\n[model]\npath = '/a'", "version: is 2, must be 1"),
        ("[model]\npath = '/a'\ndtype = 3", "model.dtype: expected `str`, got `int`"),
        ("model = 3", "model: expected a table, got int"),
        ("[model]\npath = ''", "model.path: is empty"),
        ("[model]\npath = 'a'", "model.path: is not an absolute path: a"),
        ("[model]\npath = '/a'\n[layout]\ntp = 0", "layout.tp: is 0, must be at least 1"),
        ("[model]\npath = '/a'\n[layout]\ntp = true", "layout.tp: expected `int`, got `bool`"),
        ("[model]\npath = '/a'\n[layout]\nep = 2", "layout.ep: is 2, must divide tp * dp = 1"),
        (
            "[model]\npath = '/a'\n[memory]\nslab_bytes = 1000",
            "memory.slab_bytes: is 1000, must be a multiple of 2097152",
        ),
        (
            "[model]\npath = '/a'\n[memory]\ndevice = 'cuda'",
            "memory.devices: names 0 GPUs for 1 ranks on this node",
        ),
        (
            "[model]\npath = '/a'\n[memory]\ndevices = ['GPU-0']",
            "memory.devices: names GPUs, but memory.device is cpu",
        ),
        (
            "[model]\npath = '/a'\nquantization = 'int4'",
            "model.quantization: is 'int4', must be one of 'auto', 'fp8'",
        ),
        (
            "[model]\npath = 'a'\nloader = 'publish'\nquantization = 'fp8'",
            'model.quantization: does not go with loader = "publish": the engine decides on it',
        ),
        (
            "[model]\npath = '/a'\n[access]\ngroup = 'no such group'",
            "access.group: there is no group 'no such group' on this machine",
        ),
    ],
)
def test_a_fault_is_named_with_key_and_value(text: str, wanted: str) -> None:
    assert problems(text) == [wanted]


def test_values_that_do_not_fit_together_are_all_listed() -> None:
    found = problems(
        "[model]\npath = ''\n[layout]\ntp = 4\nep = 3\nnnodes = 3\n[memory]\nslab_bytes = 1\n"
    )
    assert [line.split(":")[0] for line in found] == [
        "layout.ep", "layout.nnodes", "model.path", "memory.slab_bytes",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "data", [b"= nothing", b"\xff\xfe", b"a = 1\na = 2", b"[model\n", b"x" * (MAX_CONFIG_BYTES + 1)]
)
def test_what_is_no_toml_is_one_problem(data: bytes) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, source="x.toml")
    assert len(caught.value.problems) == 1
    assert "\n" not in caught.value.message


def test_a_published_model_needs_no_path() -> None:
    text = b"[model]\npath = 'any name'\nloader = 'publish'\n"
    assert parse_config(text, source="x").model.path == "any name"


def test_an_absent_file_says_what_writes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file") as caught:
        load_config(tmp_path / "wcache.toml")
    assert "wcache up" in caught.value.hint


def test_a_bad_file_says_what_to_do_whoever_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "wcache.toml"
    path.write_text("model = [")
    with pytest.raises(ConfigError, match="is not TOML") as caught:
        load_config(path)
    assert caught.value.hint.startswith("mend the file")


def test_a_configuration_made_in_memory_is_checked_like_a_file() -> None:
    assert check_config(FULL, source="x") is FULL
    bad = msgspec.structs.replace(FULL, memory=MemorySection(device="cuda"))
    with pytest.raises(ConfigError, match=r"x: memory\.devices"):
        check_config(bad, source="x")


@pytest.mark.parametrize("name", ["path", "hub_id", "revision"])
def test_a_name_that_no_file_can_carry_is_a_fault(name: str) -> None:
    undecodable = os.fsdecode(b"/model/\xff")
    model = msgspec.structs.replace(FULL.model, **{name: undecodable})
    with pytest.raises(ConfigError, match=rf"x: model\.{name}: is not UTF-8") as caught:
        check_config(msgspec.structs.replace(FULL, model=model), source="x")
    assert len(caught.value.problems) == 1


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "wcache.toml"
    save_config(FULL, path)
    before = path.read_bytes()

    def full_disk(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_file(path, b"half", mode=0o644)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
