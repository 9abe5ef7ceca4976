"""What ``status`` says of GPUs, with a list of devices in NVML's place."""

import json
from collections.abc import Sequence

import msgspec
import pytest

from tests.cli.views import GIB, absent, config, report, unit
from tests.places import Places
from wcache.commands.gpu_memory import GpuStatus, gpus_of, merge, note, rows, table
from wcache.config import Config, LayoutSection, MemorySection
from wcache.errors import WcacheError
from wcache.fingerprint import held_from
from wcache.holdings import Holding
from wcache.machine import devices
from wcache.machine.devices import Gpu
from wcache.paths import RankId
from wcache.ranks import RankView

pytestmark = pytest.mark.cli


def on_gpus(*uuids: str) -> Config:
    return msgspec.structs.replace(
        config(),
        layout=LayoutSection(dp=len(uuids)),
        memory=MemorySection(device="cuda", devices=uuids),
    )


def gpu(index: int, uuid: str, *, used: int) -> Gpu:
    return Gpu(index=index, uuid=uuid, name="H200", total_bytes=8 * GIB,
               free_bytes=8 * GIB - used, persistence=True)  # fmt: skip


def holds(rank: int, of: Config) -> RankView:
    return RankView(rank=rank, report=report(rank, held=held_from(of, rank)), unit=unit(rank))


BOTH = on_gpus("GPU-b", "GPU-a")
PRESENT = (gpu(0, "GPU-a", used=5 * GIB), gpu(1, "GPU-b", used=2 * GIB), gpu(2, "GPU-c", used=0))


def test_each_gpu_of_the_instance_has_its_use_and_its_holders() -> None:
    found = rows("", {0: holds(0, BOTH), 1: absent(1)}, BOTH)
    elsewhere = Holding(id=RankId("draft", 0), device="GPU-a", nbytes=3 * GIB)
    assert merge(found, PRESENT, [elsewhere]) == (
        GpuStatus(uuid="GPU-a", index=0, total_bytes=8 * GIB, used_bytes=5 * GIB, ranks=(1,),
                  others_bytes=3 * GIB),
        GpuStatus(uuid="GPU-b", index=1, total_bytes=8 * GIB, used_bytes=2 * GIB, ranks=(0,),
                  held_bytes=GIB),
    )  # fmt: skip


def test_weights_that_lie_on_another_gpu_than_the_configured_one_are_shown_where_they_are() -> None:
    now = on_gpus("GPU-c")
    found = rows("", {0: holds(0, on_gpus("GPU-a"))}, now)
    assert {row.uuid: row.held_bytes for row in found} == {"GPU-c": 0, "GPU-a": GIB}


def test_a_gpu_that_nvml_does_not_show_is_last_and_still_held() -> None:
    found = merge(rows("", {0: holds(0, BOTH), 1: holds(1, BOTH)}, None), PRESENT[:1], [])
    assert [(row.uuid, row.index, row.held_bytes) for row in found] == [
        ("GPU-a", 0, GIB), ("GPU-b", None, GIB),
    ]  # fmt: skip
    assert table(found).lines() == [
        "GPU  RANKS     HELD  OTHERS HOLD   IN USE       OF  UUID",
        "  0  1      1.0 GiB          0 B  5.0 GiB  8.0 GiB  GPU-a",
        "  -  0      1.0 GiB          0 B        -        -  GPU-b",
    ]


def test_two_gpus_that_are_gone_can_be_put_in_order() -> None:
    found = merge(rows("", {0: holds(0, BOTH), 1: holds(1, BOTH)}, None), (), [])
    assert [row.uuid for row in found] == ["GPU-a", "GPU-b"]


def test_that_nvidia_smi_shows_no_process_is_said_where_it_matters() -> None:
    held = rows("", {0: holds(0, BOTH)}, None)
    assert note(held).startswith("nvidia-smi shows no process for the 1.0 GiB held on GPUs: ")
    assert note(rows("", {0: absent(0)}, BOTH)) == ""
    assert json.loads(msgspec.json.encode(held))[0]["nvidia_smi_process"] is False


def test_weights_in_host_memory_ask_no_gpu(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> Sequence[Gpu]:
        pytest.fail("NVML was asked")

    monkeypatch.setattr(devices, "gpus", never)
    one = RankView(rank=0, report=report(0, held=held_from(config(), 0)), unit=unit(0))
    assert gpus_of(places.instance(), {0: one}, config()) == ()


def test_nvml_that_fails_hides_nothing_that_is_held(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Sequence[Gpu]:
        raise WcacheError("NVML failed: gpu is lost")

    monkeypatch.setattr(devices, "gpus", fails)
    views = {0: holds(0, BOTH)}
    (row,) = gpus_of(places.instance(), views, None)
    assert (row.held_bytes, row.used_bytes) == (GIB, None)
