"""wcache run shows an engine the GPUs in the order in which they hold its ranks."""

import pytest

from tests.places import Places
from wcache.commands.run import _gpus_shown
from wcache.config import Config, LayoutSection, MemorySection, ModelSection, save_config
from wcache.engines.interface import Wish
from wcache.errors import UsageError
from wcache.machine.devices import Gpu
from wcache.output import Output
from wcache.paths import InstancePaths
from wcache.run.gpus import shown

pytestmark = pytest.mark.unit

GPUS = tuple(
    Gpu(index=n, uuid=f"GPU-{letter}", name="H200", total_bytes=1, free_bytes=1, persistence=True)
    for n, letter in enumerate("abcd")
)


def test_nothing_is_added_where_ranks_meet_their_weights() -> None:
    assert shown(["GPU-a", "GPU-b"], GPUS, {}) == {}
    assert shown(["GPU-c", "GPU-b"], GPUS, {"CUDA_VISIBLE_DEVICES": "2,1,0"}) == {}
    assert shown(["GPU-b"], GPUS, {"CUDA_VISIBLE_DEVICES": "GPU-b"}) == {}


def test_an_instance_without_gpus_changes_nothing() -> None:
    assert shown([], GPUS, {}) == {}


@pytest.mark.parametrize(
    ("holders", "wanted"), [(["GPU-b", "GPU-a"], "1,0"), (["GPU-c", "GPU-d"], "2,3")]
)
def test_other_gpus_or_another_order_are_set(holders: list[str], wanted: str) -> None:
    added = {"CUDA_VISIBLE_DEVICES": wanted, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    assert shown(holders, GPUS, {}) == added
    assert shown(holders, GPUS, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == added
    assert shown(holders, GPUS, added) == {}


def test_the_operators_choice_is_not_overridden_but_named() -> None:
    with pytest.raises(UsageError) as raised:
        shown(["GPU-b", "GPU-a"], GPUS, {"CUDA_VISIBLE_DEVICES": "0,1"})

    assert raised.value.message == (
        "CUDA_VISIBLE_DEVICES=0,1 gives the engine's rank 0 GPU-a, and its weights are on GPU-b"
    )
    assert "CUDA_VISIBLE_DEVICES=1,0" in (raised.value.hint or "")


def test_too_few_gpus_are_named() -> None:
    with pytest.raises(UsageError, match="rank 1 no GPU, and its weights are on GPU-b"):
        shown(["GPU-a", "GPU-b"], GPUS, {"CUDA_VISIBLE_DEVICES": "0"})


def test_another_order_of_devices_is_the_operators_choice() -> None:
    environment = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    with pytest.raises(UsageError, match="CUDA_DEVICE_ORDER=FASTEST_FIRST gives"):
        shown(["GPU-b", "GPU-a"], GPUS, environment)


def test_a_gpu_that_is_gone_is_left_to_the_engine() -> None:
    assert shown(["GPU-z"], GPUS, {}) == {}


@pytest.fixture
def configured(places: Places, monkeypatch: pytest.MonkeyPatch) -> InstancePaths:
    """An instance whose two ranks are on the second GPU and the first one."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("wcache.machine.devices.gpus", lambda: GPUS)
    paths = InstancePaths.of("")
    memory = MemorySection(device="cuda", devices=("GPU-b", "GPU-a"))
    config = Config(
        model=ModelSection(path="/m", loader="publish"), layout=LayoutSection(tp=2), memory=memory
    )
    save_config(config, paths.config_file)
    return paths


@pytest.mark.parametrize(("tp", "wanted"), [(2, "1,0"), (1, None), (4, None)])
def test_an_engine_of_another_size_keeps_its_gpus(
    configured: InstancePaths, tp: int, wanted: str | None
) -> None:
    added = _gpus_shown(configured, Wish(tp=tp), Output(quiet=True), strict=True)
    assert added.get("CUDA_VISIBLE_DEVICES") == wanted


def test_a_contradiction_is_a_warning_where_the_disk_may_be_read(
    configured: InstancePaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UsageError):
        _gpus_shown(configured, Wish(tp=2), Output(), strict=True)
    assert _gpus_shown(configured, Wish(tp=2), Output(), strict=False) == {}
    assert "its weights are on GPU-b" in capsys.readouterr().err


def test_a_configuration_that_can_not_be_read_ends_no_engine(configured: InstancePaths) -> None:
    configured.config_file.write_text("[model")
    assert _gpus_shown(configured, Wish(tp=2), Output(), strict=True) == {}
