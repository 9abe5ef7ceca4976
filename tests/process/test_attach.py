"""An engine against a real daemon: published by one process, mapped and bound by another."""

import os
import signal
import subprocess
import sys

import msgspec
import pytest
import torch
from torch import nn

import wcache
from tests.daemons import Daemon, Start, report
from tests.places import Places, publish_config
from tests.processes import Store, end, wait_for
from wcache.client import Attachment
from wcache.errors import MismatchError, NotReadyError
from wcache.fingerprint import Fingerprint

pytestmark = pytest.mark.process


class Engine(nn.Module):
    """Over 2 MiB, so that it crosses slabs; ties, views, a copy of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8192)
        self.head = nn.Linear(8192, 64, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(8192)
        self.turned = nn.Parameter(torch.randn(64, 64).t())
        self.register_buffer("steps", torch.arange(64.0), persistent=False)
        self.scale = torch.tensor(0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.embed(ids)) * self.scale)
        return logits @ self.turned + self.steps  # type: ignore[no-any-return]  # nn.Module's call is untyped


_PUBLISH = """
import torch, wcache
from tests.process.test_attach import Engine
torch.manual_seed({seed})
wcache.publish(Engine().eval(), extras={{"norm.fused": True}})
"""


@pytest.fixture
def serving(places: Places, store: Store, start: Start) -> Daemon:
    """A daemon whose weights came from a process that is gone before anybody attaches."""
    places.write_config(publish_config())
    daemon = start()
    process = subprocess.Popen(
        [sys.executable, "-c", _PUBLISH.format(seed=3)], env={**os.environ, **places.environment}
    )
    try:
        store.serve(lambda: process.poll() is not None, 60.0)
    finally:
        status = end(process)
    assert status == 0
    return daemon


def published() -> Engine:
    torch.manual_seed(3)
    return Engine().eval()


def bound(attachment: Attachment) -> Engine:
    with torch.device("meta"):
        module = Engine().eval()
    attachment.bind(module)
    return module


@torch.no_grad()
def logits(module: Engine) -> torch.Tensor:
    return module(torch.arange(32))  # type: ignore[no-any-return]  # nn.Module's call is untyped


def test_attached_module_computes_what_the_published_one_does(
    places: Places, serving: Daemon
) -> None:
    with wcache.attach() as attachment:
        engine = bound(attachment)
        assert torch.equal(logits(engine), logits(published()))
        assert engine.head.weight is engine.embed.weight
        assert attachment.holds(engine.embed.weight)
        assert vars(engine.norm)["fused"] is True
        leases = report(places).leases
        assert [(lease.pid, lease.generation) for lease in leases] == [(os.getpid(), 1)]
    wait_for(lambda: not report(places).leases, "the lease has ended")


def test_engine_outlives_the_daemon_and_renews_its_lease(
    places: Places, store: Store, start: Start, serving: Daemon
) -> None:
    with wcache.attach() as attachment:
        engine = bound(attachment)
        want = logits(engine)
        end(serving, signal.SIGKILL)
        wait_for(lambda: attachment.lease_state == "renewing", "the outage is noticed")
        assert torch.equal(logits(engine), want)
        start()
        wait_for(lambda: attachment.lease_state == "held", "the lease is renewed")
        held = report(places)
        assert held.serving is not None
        assert held.serving.how == "adopted"
        assert [lease.pid for lease in held.leases] == [os.getpid()]
        with wcache.attach() as another:
            assert torch.equal(logits(bound(another)), want)


def test_lease_is_lost_when_the_daemon_comes_back_empty_and_wants_other_weights(
    places: Places, store: Store, start: Start, serving: Daemon
) -> None:
    with wcache.attach() as attachment:
        engine = bound(attachment)
        want = logits(engine)
        end(serving, signal.SIGKILL)
        for fd in store.fds.values():
            os.close(fd)
        store.fds.clear()
        config = publish_config()
        model = msgspec.structs.replace(config.model, path="next-model")
        places.write_config(msgspec.structs.replace(config, model=model))
        start()
        wait_for(lambda: attachment.lease_state.startswith("lost: "), "the lease is lost")
        assert torch.equal(logits(engine), want)


_DIE_HOLDING = """
import wcache
attachment = wcache.attach()
attachment.tensors["turned"][0, 0] = 1
"""


def test_stray_store_ends_that_engine_and_changes_nothing(places: Places, serving: Daemon) -> None:
    died = subprocess.run(
        [sys.executable, "-c", _DIE_HOLDING],
        env={**os.environ, **places.environment},
        timeout=60,
        check=False,
    )
    assert died.returncode == -signal.SIGSEGV
    wait_for(lambda: not report(places).leases, "the lease has ended")
    with wcache.attach() as attachment:
        assert torch.equal(logits(bound(attachment)), logits(published()))


def test_refusals_of_a_real_daemon_keep_their_kind(
    places: Places, store: Store, start: Start
) -> None:
    places.write_config(publish_config())
    start()
    with pytest.raises(NotReadyError, match="rank 0 is not ready"):
        wcache.attach(rank=0)


def test_other_weights_are_told_field_by_field(serving: Daemon) -> None:
    wanted = Fingerprint(dtype="float16", architecture="Engine", tp_size=2)
    with pytest.raises(MismatchError) as raised:
        wcache.attach(wanted=wanted)
    assert raised.value.message == (
        "rank 0 holds other weights: dtype: cached float32, wanted float16;"
        " tp_size: cached 1, wanted 2"
    )
    assert raised.value.hint == (  # nothing loads beside what an engine published
        "wcache status shows what is held; wcache down, once no engine uses them, and"
        " wcache up --model … --loader publish have the next engine publish its own"
    )
