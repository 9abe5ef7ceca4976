"""A daemon whose weights an operator changes, with the test in the parts of all others."""

import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

from tests.places import Places
from tests.processes import Store
from tests.publishing import content, manifest, offered
from wcache.config import Config, MemorySection, ModelSection
from wcache.fingerprint import held_from
from wcache.protocol.control import Control
from wcache.protocol.messages import (
    AskLoad,
    LoadOrder,
    Message,
    Publish,
    Published,
    Release,
    Released,
    Request,
    Stage,
    Staged,
    Switch,
    Switched,
)
from wcache.protocol.reports import GenerationReport
from wcache.protocol.wire import close_all

R = TypeVar("R", bound=Message)
T = TypeVar("T")


def model(letter: str) -> Config:
    """The configuration of a model of which nothing is on disk."""
    return Config(
        model=ModelSection(path=f"/models/{letter}", content="sha256:" + letter * 64),
        memory=MemorySection(slab_bytes=2 << 20),
    )


def meanwhile(store: Store, work: Callable[[], T]) -> T:
    """What ``work`` returns or raises, while the supervisor's part is played for the daemon."""
    outcome: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again, in the test's own thread
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    store.serve(lambda: bool(outcome or errors))
    thread.join()
    if errors:
        raise errors[0]
    return outcome[0]


def asked(places: Places, store: Store, message: Request, kind: type[R]) -> R:
    """The answer to an operator."""

    def work() -> R:
        with Control.connect(places.rank(), "operator") as control:
            return control.request(message, kind)

    return meanwhile(store, work)


def stage(places: Places, store: Store, of: Config, **options: bool) -> Staged:
    return asked(places, store, Stage(config=of, **options), Staged)


def switch(places: Places, store: Store, number: int, *, keep_old: bool = False) -> Switched:
    return asked(places, store, Switch(generation=number, keep_old=keep_old), Switched)


def release(places: Places, store: Store, *roles: str) -> Released:
    return asked(places, store, msgspec.convert({"roles": roles}, Release), Released)


def load(places: Places, store: Store, of: Config, seed: bytes) -> int:
    """What a loader does that is ordered to load ``of``; returns the generation's number."""
    described = manifest(fingerprint=held_from(of, 0))

    def work() -> int:
        with (
            Control.connect(places.rank(), "loader") as loader,
            offered(described, [content(seed)]) as fds,
        ):
            order = loader.request(AskLoad(), LoadOrder)
            assert order.config.model == of.model
            return loader.request(Publish(slabs=described.slabs), Published, fds).generation

    return meanwhile(store, work)


def roles(generations: tuple[GenerationReport, ...]) -> dict[int, str]:
    return {held.number: held.role for held in generations}


def lose(store: Store) -> None:
    """The supervisor has died, and its descriptors with it."""
    close_all(list(store.fds.values()))
    store.fds.clear()
