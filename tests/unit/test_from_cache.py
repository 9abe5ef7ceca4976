"""``from_cache`` under ``wcache run``: what it tells, whose weights it takes, when it reads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import write_llama
from tests.places import Places, publish_config
from tests.tiny_daemon import TinyDaemon
from tests.weights import Holder, cached
from wcache.checkpoint import identify, open_checkpoint
from wcache.config import Config, ModelSection
from wcache.engines import account
from wcache.engines.orders import Event, Orders
from wcache.errors import (
    CheckpointError,
    MismatchError,
    NoSuchRankError,
    OutOfMemoryError,
    UsageError,
    WcacheError,
)
from wcache.fingerprint import Fingerprint
from wcache.run.timeline import read_events
from wcache.units import size

pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

TOKENS = torch.arange(1, 9)[None]


def from_cache(*arguments: Any, **options: Any) -> Any:
    from wcache.engines.transformers import from_cache

    return from_cache(*arguments, **options)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model")


@pytest.fixture
def tuned(tmp_path: Path, model: Path) -> Path:
    """Other weights in the same layout, as a fine-tune has them."""
    folder = write_llama(tmp_path / "tuned")
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return folder


@pytest.fixture
def daemon(places: Places) -> Iterator[TinyDaemon]:
    made = TinyDaemon(places.rank())
    made.start()
    yield made
    made.close()


@pytest.fixture
def served(daemon: TinyDaemon, model: Path) -> TinyDaemon:
    """The model's weights, as a loader would have described them."""
    known = {"tp_size": 1, "dp_size": 1, "device": "cpu", "architecture": "LlamaForCausalLM"}
    content = identify(open_checkpoint(model)).digest
    fingerprint = Fingerprint(model=str(model), content=content, **known)  # type: ignore[arg-type]  # fields vary
    tensors = load_file(model / "model.safetensors")
    daemon.serve(*cached(Holder(tensors), fingerprint=fingerprint))
    return daemon


@pytest.fixture
def events(tmp_path: Path) -> Path:
    path = tmp_path / "events"
    path.touch()
    return path


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch, events: Path) -> None:
    order(monkeypatch, Orders(events=events))


def order(monkeypatch: pytest.MonkeyPatch, orders: Orders) -> None:
    for name, value in orders.environment().items():
        monkeypatch.setenv(name, value)


def outcome(events: Path) -> Event:
    found = [one for one in read_events(events) if one.name == "outcome"]
    assert len(found) == 1
    return found[0]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


# --- what it tells ----------------------------------------------------------------------------


def test_a_hit_is_told_step_by_step(
    served: TinyDaemon, ordered: None, events: Path, model: Path
) -> None:
    found = from_cache(model)
    told = read_events(events)
    assert [one.name for one in told] == [
        "imports", "fetch", "map", "build", "bind", "attach", "outcome",
    ]  # fmt: skip
    steps = {one.name: one.seconds for one in told if one.seconds is not None}
    assert sum(steps.values()) - steps["attach"] <= steps["attach"]
    assert outcome(events).outcome == "hit"
    # Nothing in it that differs from rank to rank: the outcome of many is one sentence.
    size_bytes = found.wcache_attachment.manifest.weight_bytes
    assert outcome(events).reason == f"attached to generation 1, {size(size_bytes)}"
    assert {one.rank for one in told} == {0}
    found.wcache_attachment.close()


def test_a_script_marks_its_first_token_once(
    ordered: None, events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wcache
    from wcache.engines import orders

    monkeypatch.setattr(orders, "_marked", False)
    monkeypatch.setenv("RANK", "2")
    wcache.first_token()
    wcache.first_token()
    assert [(one.name, one.rank) for one in read_events(events)] == [("first_token", 2)]


def test_instance_comes_from_the_orders(
    places: Places, monkeypatch: pytest.MonkeyPatch, events: Path
) -> None:
    order(monkeypatch, Orders(instance="draft", on_mismatch="fail", events=events))
    with pytest.raises(NoSuchRankError, match="no daemon answers for rank draft:0"):
        from_cache()
    assert (outcome(events).outcome, outcome(events).reason) == (
        "miss", "no daemon answers for rank draft:0",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WCACHE_INSTANCE": "../x"}, "../x"),
        ({"WCACHE_ON_MISMATCH": "maybe"}, "WCACHE_ON_MISMATCH is 'maybe'"),
        ({"RANK": "one"}, "RANK is not a number"),
    ],
)
def test_orders_that_are_none_are_a_mistake_and_no_miss(
    places: Places,
    monkeypatch: pytest.MonkeyPatch,
    ordered: None,
    events: Path,
    environment: dict[str, str],
    said: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as raised:
        from_cache()
    assert said in raised.value.message
    assert read_events(events) == []


# --- whose weights ----------------------------------------------------------------------------


def test_weights_of_another_checkpoint_are_a_mismatch_of_their_content(
    served: TinyDaemon, tuned: Path
) -> None:
    with pytest.raises(MismatchError, match=r"content: cached sha256:.*, wanted sha256:"):
        from_cache(tuned)


def test_other_fields_can_be_wanted_beside_the_content(served: TinyDaemon, model: Path) -> None:
    with pytest.raises(MismatchError, match=r"dtype: cached unknown, wanted float32$"):
        from_cache(model, wanted=Fingerprint(dtype="float32"))


def test_a_published_module_is_no_checkpoint_whatever_it_is_called(
    daemon: TinyDaemon, model: Path
) -> None:
    tensors = load_file(model / "model.safetensors")
    fingerprint = Fingerprint(model="mine", loader="publish", tp_size=1)
    daemon.serve(*cached(Holder(tensors), fingerprint=fingerprint))
    with pytest.raises(MismatchError, match="content: cached unknown") as raised:
        from_cache(model)
    assert "from_cache(config=…)" in raised.value.hint
    assert raised.value.__notes__ == [f"hint: {raised.value.hint}"]
    from_cache(config=model).wcache_attachment.close()


def test_a_hub_id_that_is_not_here_goes_by_its_name(
    served: TinyDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MismatchError, match=r"model: cached .*, wanted org/name$"):
        from_cache("org/name")


def test_a_model_that_is_not_there_is_named(places: Places, ordered: None, events: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint: /nowhere"):
        from_cache("/nowhere")
    assert outcome(events).reason == "no such checkpoint: /nowhere"


def test_another_number_of_processes_than_shards_is_a_mismatch(
    daemon: TinyDaemon, ordered: None, events: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(model / "model.safetensors")
    fingerprint = Fingerprint(model=str(model), tp_size=3, tp_rank=1, dp_size=1)
    daemon.serve(*cached(Holder(tensors), fingerprint=fingerprint))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MismatchError, match="tp_size: cached 3, wanted 2") as raised:
        from_cache(rank=0, fallback=True)  # alone it can not know that all processes read the disk
    assert raised.value.hint.startswith("start 3 processes")
    assert outcome(events).outcome == "mismatch"
    assert [daemon.next_event(), daemon.next_event()] == ["attach", "end"]


def test_weights_on_another_device_give_the_lease_back(served: TinyDaemon, model: Path) -> None:
    with pytest.raises(UsageError, match="weights are cached on cpu, cuda was asked for"):
        from_cache(model, device="cuda")
    assert [served.next_event(), served.next_event()] == ["attach", "end"]


# --- from disk --------------------------------------------------------------------------------


def test_without_orders_a_miss_is_an_error(places: Places, model: Path) -> None:
    with pytest.raises(NoSuchRankError):
        from_cache(model)


def test_a_miss_reads_the_disk_and_says_so(
    served: TinyDaemon,
    ordered: None,
    events: Path,
    tuned: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = from_cache(tuned, attn_implementation="eager", rms_norm_eps=0.25)
    assert found.wcache_attachment is None
    assert not found.training
    assert (found.config.rms_norm_eps, found.config._attn_implementation) == (0.25, "eager")
    weights = load_file(tuned / "model.safetensors")
    for name, tensor in weights.items():
        assert torch.equal(found.get_parameter(name), tensor)
    assert outcome(events).outcome == "mismatch"
    assert "content: cached sha256:" in outcome(events).reason
    assert read_events(events)[-1].name == "read"
    assert "MISMATCH: rank 0 reads its weights from disk, because" in caplog.text


def test_what_another_engine_has_fused_is_a_mismatch(
    daemon: TinyDaemon, ordered: None, events: Path, model: Path
) -> None:
    """Its tensors could be bound by none of their names."""
    content = identify(open_checkpoint(model)).digest
    fingerprint = Fingerprint(model=str(model), content=content, engine="vllm", tp_size=1)
    fused = {"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(4, 4)}
    daemon.serve(*cached(Holder(fused), fingerprint=fingerprint))
    found = from_cache(model)
    assert found.wcache_attachment is None
    assert outcome(events).outcome == "mismatch"
    assert outcome(events).reason.startswith("rank 0 holds tensors as vllm fuses")
    with pytest.raises(MismatchError, match="holds tensors as vllm fuses"):
        from_cache(model, fallback=False)


def test_the_hint_below_a_traceback_names_the_instance(places: Places, model: Path) -> None:
    with pytest.raises(NoSuchRankError) as raised:
        from_cache(model, instance="a")
    assert raised.value.__notes__ == ["hint: wcache status --instance a shows which ranks are up"]


def test_the_disk_gives_what_the_cache_would(
    served: TinyDaemon, places: Places, model: Path
) -> None:
    hit = from_cache(model)
    miss = from_cache(model, instance="none", fallback=True)
    assert torch.equal(logits(hit), logits(miss))
    assert hit.dtype == miss.dtype == torch.bfloat16
    hit.wcache_attachment.close()


def test_the_disk_can_be_forbidden(
    places: Places, monkeypatch: pytest.MonkeyPatch, events: Path, ordered: None, model: Path
) -> None:
    with pytest.raises(NoSuchRankError):
        from_cache(model, fallback=False)
    order(monkeypatch, Orders(on_mismatch="fail"))
    with pytest.raises(NoSuchRankError):
        from_cache(model)


def test_the_configuration_says_what_to_read_where_the_script_does_not(
    places: Places, ordered: None, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NoSuchRankError):
        from_cache()
    assert "nothing can be read instead: no checkpoint is named" in caplog.text
    places.write_config(publish_config())
    with pytest.raises(NoSuchRankError):
        from_cache()
    assert "nothing can be read instead: no such checkpoint: test-model" in caplog.text
    places.write_config(Config(model=ModelSection(path=str(model))))
    assert type(from_cache()).__name__ == "LlamaForCausalLM"


def test_a_model_that_does_not_fit_beside_what_is_resident_is_not_read(
    places: Places, ordered: None, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account, "available_bytes", lambda: 1024)
    with pytest.raises(OutOfMemoryError) as raised:
        from_cache(model)
    assert "beside what is resident on cpu, 1 KiB are free" in raised.value.message
    assert "no daemon answers for rank 0" in raised.value.message


def test_what_does_not_fit_the_model_is_an_error_and_no_miss(
    served: TinyDaemon, ordered: None, events: Path, model: Path
) -> None:
    with pytest.raises(WcacheError, match=r"in the module and not cached: model\.layers\.2"):
        from_cache(model, num_hidden_layers=3)
    assert "outcome" not in [one.name for one in read_events(events)]
