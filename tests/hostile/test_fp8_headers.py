"""FP8 checkpoints whose headers and config.json contradict each other: named, and nothing read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import FP8_CONFIG, in_fp8, qwen3_config, qwen3_tensors, write_checkpoint
from tests.loading import Daemon
from wcache import gate
from wcache.checkpoint import open_checkpoint
from wcache.config import Config, LayoutSection, ModelSection
from wcache.errors import CheckpointError, ExitCode, UnsupportedQuantForIPCError
from wcache.load import job
from wcache.paths import RankId
from wcache.protocol.messages import LoadOrder

pytestmark = pytest.mark.hostile

WEIGHT = "model.layers.1.mlp.up_proj.weight"
SCALE = WEIGHT + "_scale_inv"

Tensors = dict[str, torch.Tensor]


def _without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def _with(name: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, tensor)


SHAPE = f"scale {SCALE!r} has the shape {{}}, blocks of 128x128 of a weight [512, 256] need [4, 2]"
LIES: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "weight without scale": (_without(SCALE), f"FP8 weight {WEIGHT!r} has no scale {SCALE!r}"),
    "scale without weight": (
        _without(WEIGHT), f"{SCALE!r} is the scale of an FP8 weight, but {WEIGHT!r} is not there"
    ),
    "scale of a plain weight": (
        _with(WEIGHT, torch.ones(512, 256)),
        f"{SCALE!r} is the scale of an FP8 weight, but {WEIGHT!r} is F32",
    ),
    "scale of the transpose": (_with(SCALE, torch.ones(2, 4)), SHAPE.format("[2, 4]")),
    "scale of fewer blocks": (_with(SCALE, torch.ones(3, 2)), SHAPE.format("[3, 2]")),
    "scale of more blocks": (_with(SCALE, torch.ones(4, 3)), SHAPE.format("[4, 3]")),
    "scale of one dimension": (_with(SCALE, torch.ones(8)), SHAPE.format("[8]")),
    "scale of none": (_with(SCALE, torch.tensor(1.0)), SHAPE.format("[]")),
    "scale of nothing": (_with(SCALE, torch.ones(0, 2)), SHAPE.format("[0, 2]")),
    "scale of three dimensions": (_with(SCALE, torch.ones(1, 4, 2)), SHAPE.format("[1, 4, 2]")),
    "scale in f16": (
        _with(SCALE, torch.ones(4, 2, dtype=torch.float16)),
        f"scale {SCALE!r} is F16, not F32 or BF16",
    ),
    "scale in f64": (
        _with(SCALE, torch.ones(4, 2, dtype=torch.float64)),
        f"scale {SCALE!r} is F64, not F32 or BF16",
    ),
    "weight of one dimension": (
        _with(WEIGHT, torch.ones(512).to(torch.float8_e4m3fn)),
        f"{WEIGHT!r} is FP8 and has the shape [512], which has no blocks",
    ),
}  # fmt: skip


def _check(path: Path, line: str, monkeypatch: pytest.MonkeyPatch, tp: int = 1) -> None:
    """The gate refuses, and the loader does before it reads even a sample of the weights."""
    checkpoint = open_checkpoint(path)
    with pytest.raises(CheckpointError) as caught:
        gate.check(checkpoint)
    assert caught.value.message == f"{path}: {line}"
    assert caught.value.exit_code == ExitCode.CONFIGURATION

    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("wcache.checkpoint.identities.identify", read)
    config = Config(model=ModelSection(path=str(path)), layout=LayoutSection(tp=tp))
    with Daemon(config) as daemon, pytest.raises(CheckpointError) as caught:
        job.load(daemon, LoadOrder(generation=1, config=config), RankId("", 0))
    assert caught.value.message == f"{path}: {line}"


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("shards", [1, 4])
def test_a_header_that_lies_is_one_line(
    tmp_path: Path, lie: str, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, line = LIES[lie]
    tensors = in_fp8(qwen3_tensors())
    change(tensors)
    config = qwen3_config(quantization_config=FP8_CONFIG)
    path = write_checkpoint(tmp_path / "m", tensors, config, shards=shards)
    _check(path, line, monkeypatch, tp=2)


@pytest.mark.parametrize("settings", [None, {}])
def test_fp8_that_config_json_hides(
    tmp_path: Path, settings: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = qwen3_config(quantization_config=settings)
    path = write_checkpoint(tmp_path / "m", in_fp8(qwen3_tensors()), config)
    _check(path, "config.json does not say that weights are FP8, but they are", monkeypatch)


def test_fp8_that_config_json_makes_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = qwen3_config(quantization_config=FP8_CONFIG)
    path = write_checkpoint(tmp_path / "m", qwen3_tensors(), config)
    line = "config.json: quantization_config says that weights are FP8, but none is"
    _check(path, line, monkeypatch)


def test_a_scale_in_the_way_of_one_that_is_made(tmp_path: Path) -> None:
    """A bf16 weight beside what would be the name of its scale."""
    tensors = qwen3_tensors() | {SCALE: torch.ones(4, 2)}
    path = write_checkpoint(tmp_path / "m", tensors, qwen3_config())
    with pytest.raises(CheckpointError, match=f"but '{WEIGHT}' is BF16"):
        gate.check(open_checkpoint(path))


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json"])
@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}', "\\xff"])
def test_damaged_files_beside_config_json(tmp_path: Path, name: str, text: str) -> None:
    path = write_checkpoint(tmp_path / "m", qwen3_tensors(), qwen3_config())
    (path / name).write_bytes(text.encode().decode("unicode_escape").encode("latin-1"))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert caught.value.message.startswith(f"{path / name} ")


@pytest.mark.parametrize("value", [[], "x", 7, {"quant_method": {"a": 1}}, {"quant_method": []}])
def test_settings_of_a_wrong_type(tmp_path: Path, value: Any) -> None:
    """One line, from the parser or from the gate."""
    config = qwen3_config(quantization_config=value)
    path = write_checkpoint(tmp_path / "m", qwen3_tensors(), config)
    with pytest.raises(CheckpointError) as caught:
        gate.check(open_checkpoint(path))
    assert "\n" not in caught.value.message


def test_names_out_of_a_file_do_not_break_the_line(tmp_path: Path) -> None:
    layers = {"x\n\x1b[31mdone" + "y" * 5000: {"quant_algo": "NVFP4"}}
    config = qwen3_config(quantization_config={"quant_algo": "MIXED", "quantized_layers": layers})
    path = write_checkpoint(tmp_path / "m", qwen3_tensors(), config)
    with pytest.raises(UnsupportedQuantForIPCError) as caught:
        gate.check(open_checkpoint(path))
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 600 + len(str(path))
