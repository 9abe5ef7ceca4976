"""An engine's switches from the publisher to the engine that attaches, through a real daemon."""

import threading

import pytest
from torch import nn

import wcache
from tests.cli.snapshot import wcache as command
from tests.daemons import Start, report
from tests.places import Places, publish_config
from tests.processes import Store
from wcache.errors import MismatchError, UsageError
from wcache.fingerprint import Fingerprint
from wcache.switches import set_here

pytestmark = pytest.mark.process

FUSED = "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"


@pytest.fixture
def published(
    places: Places, store: Store, start: Start, monkeypatch: pytest.MonkeyPatch
) -> Places:
    """A rank that holds what an SGLang with a layout switch has loaded."""
    places.write_config(publish_config())
    start()
    for name, value in {FUSED: "1", "SGLANG_PORT": "7", "SGLANG_API_KEY": "no"}.items():
        monkeypatch.setenv(name, value)
    done = threading.Event()

    def publish() -> None:
        try:
            wcache.publish(
                nn.Linear(2, 2),
                engine="sglang",
                engine_version="0.5.23",
                switches={"moe_runner_backend": "triton"},
            )
        finally:
            done.set()

    thread = threading.Thread(target=publish)
    thread.start()
    store.serve(done.is_set)
    thread.join()
    return places


def wanted(**settings: str) -> Fingerprint:
    """What an engine asks for that has the environment of this process."""
    return Fingerprint(
        engine="sglang", engine_version="0.5.23", switches=set_here("sglang", settings)
    )


def test_what_was_set_when_weights_were_published_is_in_their_fingerprint(
    published: Places,
) -> None:
    serving = report(published).serving
    assert serving is not None
    assert serving.fingerprint.engine == "sglang"
    assert serving.fingerprint.switches == {FUSED: "1", "moe_runner_backend": "triton"}


def test_an_engine_with_the_same_switches_attaches(published: Places) -> None:
    with wcache.attach(wanted=wanted(moe_runner_backend="triton")) as attachment:
        assert attachment.lease_state == "held"


def test_every_switch_that_is_another_is_named(
    published: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FUSED)
    monkeypatch.setenv("SGLANG_USE_AITER", "1")
    with pytest.raises(MismatchError) as caught:
        wcache.attach(wanted=wanted(moe_runner_backend="deep_gemm"))
    assert caught.value.message == (
        "rank 0 holds other weights:"
        " switches.SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED: cached 1, wanted not set;"
        " switches.SGLANG_USE_AITER: cached not set, wanted 1;"
        " switches.moe_runner_backend: cached triton, wanted deep_gemm"
    )


def test_another_version_of_the_engine_is_another_layout(published: Places) -> None:
    with pytest.raises(MismatchError, match=r"engine_version: cached 0\.5\.23, wanted 0\.6\.0"):
        wcache.attach(wanted=Fingerprint(engine="sglang", engine_version="0.6.0"))


def test_the_running_fingerprint_is_compared_switch_by_switch(published: Places) -> None:
    file = published.rank().fingerprint_file
    same = command(published, "fingerprint", str(file), "--running", "0")
    assert (same.code, same.stdout) == (0, "")
    other = published.root / "other.json"
    other.write_text(file.read_text().replace('"triton"', '"deep_gemm"'))
    found = command(published, "fingerprint", str(other), "--running", "0")
    assert found.code == 5
    assert found.stdout.split() == [
        "FIELD", "THIS", "OTHER", "RESULT",
        "switches.moe_runner_backend", "deep_gemm", "triton", "mismatch",
    ]  # fmt: skip


def test_too_many_switches_are_refused_before_anybody_is_asked(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        monkeypatch.setenv(f"VLLM_X{number}", "1")
    with pytest.raises(UsageError, match="switches are set"):
        wcache.publish(nn.Linear(2, 2), engine="vllm")
