"""Attaching: what is mapped, what is refused, and what is left behind."""

import faulthandler
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests.places import Places
from tests.processes import PATIENCE_S, wait_for
from tests.tiny_daemon import Question, TinyDaemon
from tests.weights import FINGERPRINT, Holder, cached
from wcache import manifest as manifests
from wcache.client import attach
from wcache.difference import Difference
from wcache.errors import (
    ManifestError,
    MismatchError,
    NoSuchRankError,
    NotReadyError,
    ProtocolError,
    TryAgainError,
    UsageError,
    WcacheError,
)
from wcache.fingerprint import Fingerprint
from wcache.manifest import Manifest, SlabInfo
from wcache.memory.dtypes import TORCH_DTYPES
from wcache.memory.memfd import create_sealed
from wcache.memory.slab import Access
from wcache.protocol.control import SilentDaemonError, own_command
from wcache.protocol.messages import MAX_TEXT, Refused, Reply

pytestmark = pytest.mark.unit


class Odd(torch.nn.Module):
    """One of each thing that is easily lost on the way."""

    def __init__(self) -> None:
        super().__init__()
        for name, dtype in TORCH_DTYPES.items():
            values = torch.arange(24, dtype=torch.float32).remainder(2).to(dtype)
            self.register_buffer(f"of_{name}", values.reshape(4, 6))
        base = torch.arange(120, dtype=torch.float32).reshape(10, 12)
        self.weight = torch.nn.Parameter(base)
        self.turned = torch.nn.Parameter(base.detach().t())
        self.part = torch.nn.Parameter(base.detach()[2:7, 1::2])
        self.same = self.weight
        self.scalar = torch.nn.Parameter(torch.tensor(2.5))
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))
        # Over 2 MiB, so that it crosses from one slab into the next.
        self.large = torch.nn.Parameter(torch.arange(1 << 20, dtype=torch.float32))


@pytest.fixture
def daemon(places: Places) -> Iterator[TinyDaemon]:
    made = TinyDaemon(places.rank())
    made.start()
    yield made
    made.close()


@pytest.fixture
def odd(daemon: TinyDaemon) -> Odd:
    module = Odd()
    daemon.serve(*cached(module))
    return module


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


def test_every_tensor_comes_out_as_it_went_in(odd: Odd) -> None:
    with attach(rank=0) as attachment:
        tensors = attachment.tensors
        published = {
            **dict(odd.named_parameters(remove_duplicate=False)),
            **dict(odd.named_buffers()),
        }
        assert tensors.keys() == published.keys()
        for name, want in published.items():
            got = tensors[name]
            assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
            assert _same_bytes(got, want.detach()), name
        assert tensors["same"] is tensors["weight"]
        assert tensors["turned"].data_ptr() == tensors["weight"].data_ptr()
        assert all(attachment.holds(tensor) for tensor in tensors.values())
        assert not attachment.holds(torch.ones(1))
        assert len(attachment.manifest.slabs) > 2
        assert attachment.fingerprint == FINGERPRINT
        assert attachment.lease_state == "held"


def test_rank_and_instance_come_from_the_environment(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = TinyDaemon(places.rank(3, "draft"))
    daemon.start()
    daemon.serve(*cached(torch.nn.Linear(2, 2)))
    monkeypatch.setenv("WCACHE_RANK", "3")
    monkeypatch.setenv("WCACHE_INSTANCE", "draft")
    with attach() as attachment:
        assert str(attachment.rank_id) == "draft:3"
    daemon.close()
    monkeypatch.setenv("WCACHE_RANK", "three")
    with pytest.raises(UsageError, match="WCACHE_RANK is not a number"):
        attach()


def test_what_attaching_took_is_told_by_step(odd: Odd) -> None:
    with attach() as attachment:
        assert list(attachment.seconds) == ["fetch", "map"]
        assert all(seconds > 0 for seconds in attachment.seconds.values())


def test_store_into_the_map_ends_only_the_process_that_did_it(odd: Odd) -> None:
    with attach() as attachment:
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            attachment.tensors["weight"][0, 0] = 1
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert os.WTERMSIG(status) == signal.SIGSEGV
        assert torch.equal(attachment.tensors["weight"], odd.weight)


def test_private_map_can_be_written_to_and_nobody_sees_it(odd: Odd) -> None:
    with attach(access=Access.PRIVATE) as one, attach() as other:
        one.tensors["weight"].fill_(7)
        assert one.tensors["same"][3, 3] == 7
        assert torch.equal(other.tensors["weight"], odd.weight)


def test_mapping_for_writing_is_refused(odd: Odd) -> None:
    with pytest.raises(UsageError, match="can not be mapped for writing"):
        attach(access=Access.WRITE)


# --- the end ----------------------------------------------------------------------------------


def _is_mapped() -> bool:
    return "wcache-slab" in Path("/proc/self/maps").read_text()


def test_memory_is_unmapped_with_the_last_tensor_after_closing(daemon: TinyDaemon) -> None:
    daemon.serve(*cached(torch.nn.Linear(4, 4, bias=False)))
    attachment = attach()
    view = attachment.tensors["weight"][1:]
    want = view.clone()
    attachment.close()
    attachment.close()
    assert [daemon.next_event(), daemon.next_event()] == ["attach", "end"]
    assert torch.equal(view, want)
    assert _is_mapped()
    with pytest.raises(ValueError, match="closed"):
        _ = attachment.tensors
    del view
    gc.collect()
    assert not _is_mapped()


def test_forgotten_attachment_ends_its_lease(daemon: TinyDaemon, odd: Odd) -> None:
    attachment = attach()
    assert daemon.next_event() == "attach"
    del attachment
    gc.collect()
    assert daemon.next_event() == "end"
    assert not _is_mapped()


def test_weights_stay_when_the_daemon_goes(daemon: TinyDaemon, odd: Odd) -> None:
    with attach() as attachment:
        daemon.stop()
        wait_for(lambda: attachment.lease_state == "renewing", "the outage is noticed")
        assert torch.equal(attachment.tensors["large"], odd.large)
        daemon.start()
        wait_for(lambda: attachment.lease_state == "held", "the lease is renewed")


def test_descriptors_are_kept_for_as_long_as_the_lease(daemon: TinyDaemon, odd: Odd) -> None:
    before = _memfds()
    with attach() as attachment:
        # One of each beside the daemon's own.
        assert _memfds() - before == dict.fromkeys(_served(daemon), 1)
        large = attachment.tensors["large"]
    assert _memfds() == before
    assert torch.equal(large, odd.large)


def test_descriptors_are_closed_by_the_garbage_collector_too(daemon: TinyDaemon, odd: Odd) -> None:
    before = _memfds()
    attachment = attach()
    del attachment
    gc.collect()
    wait_for(lambda: _memfds() == before, "they are closed")


def test_descriptors_reach_no_program_that_the_engine_starts(daemon: TinyDaemon, odd: Odd) -> None:
    with attach():
        # It may fail for a pipe of its own that is gone by then.
        listed = subprocess.run(
            ["ls", "-Li", "/proc/self/fd/"], close_fds=False, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        seen = {int(line.split()[0]) for line in listed.stdout.splitlines()}
        assert seen
        assert not seen.intersection(_served(daemon))


def test_descriptors_stay_the_parents_after_a_fork(daemon: TinyDaemon, odd: Odd) -> None:
    before = _memfds()
    with attach():
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, str(_memfds() == before).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 10) == b"True"
        os.close(read)
        os.close(write)
        assert _memfds() - before == dict.fromkeys(_served(daemon), 1)


def test_an_engine_that_may_open_few_files_keeps_none(
    daemon: TinyDaemon, odd: Odd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (12, 12))
    before = _memfds()
    with attach():
        assert _memfds() == before


def _memfds() -> Counter[int]:
    """How many descriptors this process has of each memfd, by inode; the daemon in it has its own.

    What tests before this one have left to the garbage collector is collected first.
    """
    gc.collect()
    return Counter(path.stat().st_ino for path in _fds() if "memfd:" in str(path.readlink()))


def _served(daemon: TinyDaemon) -> list[int]:
    """Inodes of the manifest and the slabs that ``daemon`` gives out."""
    return [os.fstat(fd).st_ino for fd in daemon.fds]


def _fds() -> list[Path]:
    """Descriptors of this process; the one that lists them is gone already."""
    return [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]


# --- refusals ---------------------------------------------------------------------------------


def test_other_weights_are_told_field_by_field(daemon: TinyDaemon, odd: Odd) -> None:
    found = (
        Difference("dtype", "bfloat16", "float16"),
        *(Difference(f"switches.s{number}", "0", "1") for number in range(6)),
    )
    refusal = Refused(reason="mismatch", message="no", hint="the hint", differences=found)
    daemon.answer = lambda _: refusal
    with pytest.raises(MismatchError) as raised:
        attach(wanted=Fingerprint(dtype="float16"))
    assert raised.value.message == (
        "rank 0 holds other weights: dtype: cached bfloat16, wanted float16;"
        " switches.s0: cached 0, wanted 1; switches.s1: cached 0, wanted 1;"
        " switches.s2: cached 0, wanted 1; switches.s3: cached 0, wanted 1; and 2 more:"
        " wcache logs 0 shows all"
    )
    assert raised.value.differences == found
    assert raised.value.hint == "the hint"


def test_manifest_of_other_weights_is_not_taken_on_trust(odd: Odd) -> None:
    with pytest.raises(MismatchError, match="tp_size: cached 1, wanted 8"):
        attach(wanted=Fingerprint(tp_size=8))
    assert not _is_mapped()


def test_rank_that_is_not_ready_fails_at_once(daemon: TinyDaemon) -> None:
    daemon.answer = lambda _: Refused(reason="not_ready", message="rank 0 is not ready: loading")
    with pytest.raises(NotReadyError, match="loading"):
        attach()
    assert daemon.next_event() == "attach"
    assert daemon.next_event() == "end"
    assert daemon.events.empty()


def test_waiting_outlasts_a_daemon_that_is_not_up_and_not_ready(
    daemon: TinyDaemon, odd: Odd
) -> None:
    refusals = [Refused(reason="not_ready", message="not ready")] * 2

    def answer(request: Question) -> Reply:
        return refusals.pop() if refusals else daemon.usual(request)

    daemon.answer = answer
    daemon.stop()
    later = threading.Timer(0.2, daemon.start)
    later.start()
    with attach(wait_s=PATIENCE_S) as attachment:
        assert attachment.lease_state == "held"
    later.join()
    assert not refusals


def test_waiting_ends(daemon: TinyDaemon) -> None:
    daemon.answer = lambda _: Refused(reason="not_ready", message="not ready")
    with pytest.raises(NotReadyError):
        attach(wait_s=0.1)


def test_absent_daemon_is_no_such_rank(places: Places) -> None:
    with pytest.raises(NoSuchRankError, match="no daemon answers for rank 5"):
        attach(rank=5)
    with pytest.raises(UsageError, match="not a rank: -1"):
        attach(rank=-1)
    with pytest.raises(UsageError, match="not an instance name"):
        attach(instance="../etc")


@pytest.mark.parametrize("is_asked_to_end", [False, True], ids=["killed", "restarted"])
def test_daemon_that_has_just_ended_is_waited_for(
    daemon: TinyDaemon, odd: Odd, *, is_asked_to_end: bool
) -> None:
    daemon.stop()
    assert daemon.paths.socket.exists()  # as of one that was killed
    if is_asked_to_end:
        daemon.paths.socket.unlink()
        daemon.paths.served_file.touch()
    later = threading.Timer(0.2, daemon.start)
    later.start()
    with attach() as attachment:
        assert attachment.lease_state == "held"
    later.join()


def test_daemon_that_dies_while_it_is_asked_is_asked_again(daemon: TinyDaemon, odd: Odd) -> None:
    """It keeps the weights: an engine that gave up here would read the disk."""
    answers = [None, None]

    def answer(request: Question) -> Reply | None:
        return answers.pop() if answers else daemon.usual(request)

    daemon.answer = answer
    with attach() as attachment:
        assert attachment.lease_state == "held"
    assert not answers


def test_daemon_that_always_dies_while_it_is_asked(daemon: TinyDaemon) -> None:
    daemon.answer = lambda _: None
    with pytest.raises(TryAgainError, match="ended while it was asked"):
        attach(comes_back_s=0.1)


def test_daemon_that_never_answers(daemon: TinyDaemon) -> None:
    release = threading.Event()

    def answer(request: Question) -> None:
        release.wait(PATIENCE_S)

    daemon.answer = answer
    with pytest.raises(SilentDaemonError, match="daemon of rank 0 does not answer"):
        attach(timeout_s=0.2)
    release.set()


# --- what a broken or lying daemon gives ------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ("digest", ManifestError, "manifest has digest"),
        ("slabs", ManifestError, "other slabs"),
        ("count", ProtocolError, "descriptors came"),
        ("range", ManifestError, "manifest ends at byte"),
        ("no slabs", ManifestError, "other slabs"),
        ("not sealed", ProtocolError, "not sealed"),
        ("short slab", ProtocolError, "host slab has"),
        ("garbage", ManifestError, "can not be read"),
        ("no such gpu", WcacheError, "(?i)gpu|cuda|driver"),
    ],
)
def test_what_can_not_be_mapped_is_refused_and_nothing_is_left(
    daemon: TinyDaemon, odd: Odd, how: str, error: type[WcacheError], said: str
) -> None:
    _spoil(daemon, how)
    with pytest.raises(error, match=said):
        attach()
    assert [daemon.next_event(), daemon.next_event()] == ["attach", "end"]
    before = len(_fds())
    with pytest.raises(error, match=said):
        attach()
    assert [daemon.next_event(), daemon.next_event()] == ["attach", "end"]
    assert len(_fds()) == before
    assert not _is_mapped()


def _spoil(daemon: TinyDaemon, how: str) -> None:
    assert daemon.attached is not None
    slabs = daemon.attached.slabs
    manifest = manifests.decode(os.pread(daemon.fds[0], 1 << 20, 0))
    match how:
        case "digest":
            daemon.said(slabs, "sha256:" + "0" * 64)
        case "slabs":
            daemon.said((*slabs[:-1], SlabInfo(kind="host", nbytes=4 << 20)))
        case "count":
            daemon.said(slabs[:-1])
        case "range":
            last = manifest.storages[-1]
            beyond = msgspec.structs.replace(last, offset=64 << 20)
            _give(
                daemon,
                msgspec.structs.replace(manifest, storages=(*manifest.storages[:-1], beyond)),
            )
        case "no slabs":
            _give(daemon, msgspec.structs.replace(manifest, slabs=()))
        case "not sealed":
            os.close(daemon.fds[1])
            daemon.fds[1] = os.memfd_create("open", os.MFD_ALLOW_SEALING)
            os.truncate(daemon.fds[1], slabs[0].nbytes)
        case "short slab":
            wrong = tuple(SlabInfo(kind="host", nbytes=2 * slab.nbytes) for slab in slabs)
            _give(daemon, msgspec.structs.replace(manifest, slabs=wrong))
        case "garbage":
            _give(daemon, b"\xff{")
        case "no such gpu":
            gpu = "GPU-00000000-0000-0000-0000-000000000000"
            cuda = tuple(
                SlabInfo(kind="cuda", nbytes=slab.nbytes, device_uuid=gpu) for slab in slabs
            )
            _give(daemon, msgspec.structs.replace(manifest, slabs=cuda))


def _give(daemon: TinyDaemon, manifest: Manifest | bytes) -> None:
    """Replaces the manifest that is handed out, with its true digest."""
    data = manifest if isinstance(manifest, bytes) else manifests.encode(manifest)
    os.close(daemon.fds[0])
    daemon.fds[0] = create_sealed("test-manifest", data)
    assert daemon.attached is not None
    slabs = manifest.slabs if isinstance(manifest, Manifest) else daemon.attached.slabs
    if not slabs:
        slabs = daemon.attached.slabs
    daemon.said(slabs, manifests.digest(data))


def test_tensor_of_a_dtype_that_torch_lacks_is_named(
    daemon: TinyDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.serve(*cached(Holder({"a.b": torch.ones(2)})))
    monkeypatch.delitem(TORCH_DTYPES, "F32")
    with pytest.raises(ManifestError, match=r"tensor 'a.b' has dtype F32, which torch"):
        attach()
    assert not _is_mapped()


def test_an_engine_is_known_by_the_command_that_wcache_run_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert own_command() == " ".join(sys.orig_argv)[:MAX_TEXT]
    monkeypatch.setenv("WCACHE_COMMAND", "vllm serve /m")
    assert own_command() == "vllm serve /m"
