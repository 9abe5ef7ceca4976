"""A load from its order to its publication, with a real checkpoint and real slabs."""

import logging
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import llama_tensors, write_checkpoint, write_llama
from tests.loading import EMBEDDING, Daemon, manifest_of, tensors_of
from tests.places import Places
from wcache.checkpoint import identify, open_checkpoint
from wcache.config import Config, LayoutSection, MemorySection, ModelSection
from wcache.errors import (
    CheckpointError,
    ExitCode,
    NoSuchRankError,
    OutOfMemoryError,
    TryAgainError,
    WcacheError,
)
from wcache.fingerprint import compare, wanted_by
from wcache.load import job
from wcache.load.publish import digested
from wcache.load.report import ProgressReport, failure_told
from wcache.memory.digest import digest
from wcache.paths import RankId
from wcache.protocol.control import Channel
from wcache.protocol.messages import LoadOrder, Request, Welcome

pytestmark = pytest.mark.unit


def _config(path: Path, *, content: str | None = None, dtype: Any = "auto", tp: int = 1) -> Config:
    return Config(
        model=ModelSection(path=str(path), content=content, dtype=dtype),
        layout=LayoutSection(tp=tp),
        memory=MemorySection(slab_bytes=2 << 20),
    )


def _load(config: Config, rank: int = 0) -> Daemon:
    daemon = Daemon(config)
    order = LoadOrder(generation=1, config=config)
    with failure_told(daemon):
        assert job.load(daemon, order, RankId("", rank)) == 1
    return daemon


def test_the_daemon_gets_the_checkpoint(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m", llama_tensors(), shards=2)
    expected = llama_tensors()
    with _load(_config(path)) as daemon:
        found = tensors_of(daemon.generation)
        assert found.keys() == expected.keys() | {"lm_head.weight"}
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        manifest = manifest_of(daemon.generation)
        assert [shard.name for shard in manifest.checkpoint] == sorted(
            file.name for file in path.glob("*.safetensors")
        )
        (head,) = (t for t in manifest.tensors if t.name == "lm_head.weight")
        assert head.tied_to == EMBEDDING


def test_digests_are_those_of_the_bytes(tmp_path: Path) -> None:
    with _load(_config(write_llama(tmp_path / "m"))) as daemon:
        manifest = manifest_of(daemon.generation)
        found = tensors_of(daemon.generation)
        for tensor in manifest.tensors:
            content = found[tensor.name].contiguous().view(-1).view(torch.uint8)
            assert digest(content) == manifest.storages[tensor.storage].digest


@pytest.mark.parametrize("tp", [1, 3])
def test_what_is_held_is_what_was_wanted(tmp_path: Path, tp: int) -> None:
    pytest.importorskip("transformers")
    path = write_llama(tmp_path / "m")
    content = identify(open_checkpoint(path)).digest
    config = _config(path, content=content, dtype="float16", tp=tp)
    for rank in range(tp):
        with _load(config, rank) as daemon:
            held = manifest_of(daemon.generation).fingerprint
            assert compare(held, wanted_by(config, rank)) == ()
            assert (held.architecture, held.content) == ("LlamaForCausalLM", content)
            assert held.torch_version == torch.__version__


def test_one_rank_of_three_holds_its_shard(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = write_llama(tmp_path / "m")
    name = "model.layers.1.self_attn.o_proj.weight"
    with _load(_config(path, tp=3), 2) as daemon:
        whole = load_file(path / "model.safetensors")[name]
        assert torch.equal(tensors_of(daemon.generation)[name], whole[:, 32:])


def test_every_load_is_a_generation_of_its_own(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m")
    with _load(_config(path)) as one, _load(_config(path)) as other:
        assert manifest_of(one.generation).id != manifest_of(other.generation).id
        assert manifest_of(one.generation).storages == manifest_of(other.generation).storages


def test_progress_goes_through_all_phases(tmp_path: Path) -> None:
    with _load(_config(write_llama(tmp_path / "m"))) as daemon:
        phases = list(dict.fromkeys(message.phase for message in daemon.progress))
        assert phases == ["plan", "allocate", "read", "publish"]
        last = {message.phase: message for message in daemon.progress}
        weight_bytes = manifest_of(daemon.generation).weight_bytes
        assert last["read"].done_bytes == last["read"].total_bytes == weight_bytes


def test_progress_is_told_ten_times_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    daemon = Daemon(Config(model=ModelSection(path="/m")))
    report = ProgressReport(daemon)
    report.begin("read", 1000)
    for done in range(1, 1001):
        now[0] += 0.001
        report.advance(done)
    assert 10 <= len(daemon.progress) <= 12
    assert daemon.progress[-1].done_bytes == 1000


def test_another_checkpoint_than_up_saw_is_refused_and_told(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m")
    daemon = Daemon(_config(path, content="sha256:" + "0" * 64))
    order = LoadOrder(generation=1, config=daemon.config)
    with pytest.raises(CheckpointError) as caught, failure_told(daemon):
        job.load(daemon, order, RankId("", 0))
    digest_ = identify(open_checkpoint(path)).digest
    assert caught.value.message == (
        f"checkpoint {path} is not the one that `wcache up` saw:"
        f" it is {digest_[:19]}, sha256:000000000000 was recorded"
    )
    (failure,) = daemon.failures
    assert (failure.message, failure.hint) == (caught.value.message, caught.value.hint)


def test_too_little_memory_is_said_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wcache.memory.host.HostMemory.free_bytes", lambda _: 1000)
    monkeypatch.setattr("wcache.memory.host.HostMemory.create", None)
    config = _config(write_llama(tmp_path / "m"))
    with pytest.raises(OutOfMemoryError) as caught:
        _load(config)
    assert caught.value.message == (
        "rank 0 needs 2.0 MiB of memory (2097152 bytes), the host has 1000 B free (1000 bytes)"
    )


def test_a_gpu_that_fills_up_during_the_load_is_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 MiB")

    monkeypatch.setattr("wcache.load.read.read_plan", full)
    with pytest.raises(OutOfMemoryError, match=r"the GPU is too full: cuda out of memory$"):
        _load(_config(write_llama(tmp_path / "m")))


def test_a_bug_is_told_and_still_a_traceback() -> None:
    daemon = Daemon(Config(model=ModelSection(path="/m")))
    with pytest.raises(ZeroDivisionError), failure_told(daemon):
        print(1 // 0)
    (failure,) = daemon.failures
    assert failure.message == "loader bug: ZeroDivisionError: integer division or modulo by zero"


def test_a_failure_is_no_worse_when_nobody_can_be_told() -> None:
    class Gone(Daemon):
        def tell(self, message: Request) -> None:
            raise BrokenPipeError(str(message))

    with (
        pytest.raises(CheckpointError, match="why"),
        failure_told(Gone(Config(model=ModelSection(path="/m")))),
    ):
        raise CheckpointError("why")


def test_nothing_to_load_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        daemon = Daemon(Config(model=ModelSection(path="/m")), wants=False)
        assert job.order_for_checkpoint(daemon) is None
    assert caplog.messages == ["rank 0 holds generation 1"]


def test_a_rank_that_an_engine_publishes_to_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = Config(model=ModelSection(path="m", loader="publish"))
    with caplog.at_level(logging.INFO):
        assert job.order_for_checkpoint(Daemon(config)) is None
    assert caplog.messages == ["nothing to load: the rank waits for the first engine to publish"]


def test_a_daemon_that_does_not_come_is_waited_for_and_then_named(places: Places) -> None:
    with pytest.raises(NoSuchRankError, match="no daemon answers for rank 0"):
        job.connect_when_up(places.rank(0), timeout_s=0.25)


def _hang_up_after_the_order(listener: socket.socket, config: Config) -> None:
    """A daemon that dies right after it has given the load to somebody."""
    connection, _ = listener.accept()
    channel = Channel(connection)
    channel.receive_body()
    channel.send(Welcome(instance="", rank=0, pid=1))
    channel.receive_body()
    channel.send(LoadOrder(generation=1, config=config))
    channel.close()


def test_a_daemon_that_goes_away_is_tried_again_later(places: Places, tmp_path: Path) -> None:
    config = _config(write_llama(tmp_path / "m"))
    places.rank(0).folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(places.rank(0).socket))
        listener.listen()
        thread = threading.Thread(target=_hang_up_after_the_order, args=(listener, config))
        thread.start()
        with pytest.raises(TryAgainError, match="the daemon of rank 0 went away during the load"):
            job.run(RankId("", 0))
        thread.join()


def test_the_batches_of_digests_cover_everything_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wcache.load.publish._DIGEST_BATCH_BYTES", 100)
    content = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    spans = [(0, 60), (60, 0), (60, 60), (120, 100), (220, 36)]
    seen: list[int] = []
    storages = digested(content, spans, seen.append)
    assert [(storage.offset, storage.nbytes) for storage in storages] == spans
    assert [storage.digest for storage in storages] == [
        digest(content[offset : offset + nbytes]) for offset, nbytes in spans
    ]
    assert seen == [120, 220, 256]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "usage: python -m wcache.load RANK (hint: RANK is 3 or NAME:3)"),
        (["x"], "not a rank: 'x' (hint: a rank is written 3 or NAME:3)"),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments: list[str], line: str) -> None:
    command = [sys.executable, "-m", "wcache.load", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.endswith(f": {line}\n")
    assert done.stderr.count("\n") == 1


def test_the_loader_is_imported_without_torch() -> None:
    code = (
        "import sys, wcache.load.__main__;"
        "print({'torch', 'transformers', 'typer', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "set()\n"


def test_a_manifest_is_json_that_reads_back(tmp_path: Path) -> None:
    with _load(_config(write_llama(tmp_path / "m"))) as daemon:
        manifest = manifest_of(daemon.generation)
        again = msgspec.json.decode(msgspec.json.encode(manifest), type=type(manifest))
        assert again == manifest


def test_a_temporary_folder_without_room_is_named_and_no_bug(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under systemd, where the unit may write to nothing else and /run is full."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    monkeypatch.setenv("TMPDIR", "/proc/none")
    with pytest.raises(WcacheError, match="no temporary file can be written to /proc/none"):
        job.check_temporary_folder()


@pytest.mark.parametrize(
    ("code", "said"),
    [("print('last', end='')", "last"), ("sys.stdout.close()", ""), ("sys.stdout = None", "")],
    ids=["not_flushed", "closed", "none"],
)
def test_a_loader_that_leaves_loses_neither_its_words_nor_its_status(code: str, said: str) -> None:
    """An engine may have done anything to the streams; the status says whether the load failed."""
    script = f"import sys\nfrom wcache.load.__main__ import leave\n{code}\nleave(3)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, said, "")
