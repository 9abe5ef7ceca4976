"""GPUs are found by UUID and filtered as CUDA does it; having none is no special case."""

import pytest

from wcache.errors import WcacheError
from wcache.machine import devices
from wcache.machine.devices import Gpu, gpu, gpus, processes, select, visible_gpus
from wcache.memory import driver, open_memory

pytestmark = pytest.mark.unit


def made(index: int, uuid: str) -> Gpu:
    return Gpu(index=index, uuid=uuid, name="H200", total_bytes=8, free_bytes=4, persistence=True)


A, B, C = (made(i, uuid) for i, uuid in enumerate(["GPU-aa11", "GPU-aa22", "GPU-bb33"]))


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ("0,1,2", (A, B, C)),
        ("2, 0", (C, A)),
        ("GPU-bb33,GPU-aa1", (C, A)),
        ("GPU-b", (C,)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("1,-1,2", (B,)),
        ("1,7,2", (B,)),
        ("GPU-aa", ()),
        ("0,GPU-nothere,2", (A,)),
        ("0,0", ()),
        ("²", ()),
    ],
)
def test_visible_devices_are_chosen_as_cuda_does_it(value: str, chosen: tuple[Gpu, ...]) -> None:
    assert select((A, B, C), value) == chosen


def test_all_are_visible_unless_the_environment_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: (A, B, C))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == (A, B, C)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible_gpus() == (B,)


def test_a_gpu_is_found_by_uuid_and_an_absent_one_is_said_with_those_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: (A, B))
    assert gpu("GPU-aa22") == B
    with pytest.raises(WcacheError, match="no GPU GPU-cc44") as raised:
        gpu("GPU-cc44")
    assert raised.value.hint == "GPUs are GPU-aa11, GPU-aa22"


def test_a_machine_without_a_driver_has_no_gpus() -> None:
    if gpus():
        pytest.skip("there are GPUs here")
    assert visible_gpus() == ()
    assert not driver.driver_available()
    with pytest.raises(WcacheError, match="there is no GPU"):
        gpu("GPU-aa11")
    with pytest.raises(WcacheError, match="there is no GPU"):
        processes("GPU-aa11")
    with pytest.raises(WcacheError, match=r"no NVIDIA driver|cuda-bindings is not installed"):
        open_memory("cuda", device_uuid="GPU-aa11")


def test_a_uuid_is_written_as_nvidia_smi_does() -> None:
    text = driver._uuid_text(bytes(range(16)))
    assert text == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
