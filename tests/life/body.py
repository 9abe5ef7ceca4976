"""A rank whose daemon is run, killed and started again in the test's own process."""

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from tests.changeover import model
from tests.life.keeper import Clock, Keeper, Killed
from tests.places import Places
from tests.publishing import SLAB_BYTES, manifest
from wcache import manifest as manifests
from wcache.config import Config
from wcache.daemon.configuration import STORED_NAME, Configuration
from wcache.daemon.rank import Rank
from wcache.errors import ConfigError
from wcache.fingerprint import held_from
from wcache.manifest import SlabInfo
from wcache.memory.memfd import create_sealed, read_sealed
from wcache.protocol.messages import CheckOrder, LoadOrder, Publish, encode_frame
from wcache.protocol.wire import close_all
from wcache.state import loads, serves

T = TypeVar("T")

# For so long a daemon frees nothing that engines of the one before it may still renew.
GRACE_S = 30


@dataclass
class Engine:
    """Has a generation mapped, whatever becomes of the daemon."""

    digest: str
    fds: list[int]
    slabs: tuple[SlabInfo, ...]
    peer: int | None
    """Its connection; None while it has no lease."""


@dataclass(frozen=True)
class Kept:
    """What must outlive a daemon; generations are named by their manifest's digest."""

    served: str = ""
    held: str = ""
    candidate: Config | None = None
    digests: frozenset[str] = frozenset()
    configs: dict[str, Config | None] = field(default_factory=dict)


class Body:
    """The rank, what is outside its daemon, and all that must be true of both at any time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.before_all = descriptors()
        self.places = Places(Path(tempfile.mkdtemp(prefix="wc")))
        self.places.rank().folder.mkdir(parents=True)
        self.keeper = Keeper(clock)
        self.rank: Rank | None = None
        self.engines: list[Engine] = []
        self.made: dict[str, tuple[str, tuple[int, ...]]] = {}
        """Of every manifest there was, the model and the slabs' inodes."""
        self.order: LoadOrder | CheckOrder | None = None
        """What the loader has been told, if there is one."""
        self.loader = 0
        self.is_safe = True
        """No supervisor was lost since a daemon has told all that it has."""
        self.renewable: frozenset[str] = frozenset()
        self.renewable_until = 0.0
        self._peers = 0

    @property
    def alive(self) -> Rank:
        assert self.rank is not None
        return self.rank

    def new_peer(self) -> int:
        self._peers += 1
        return self._peers

    def write_config(self, letter: str) -> None:
        self.places.write_config(model(letter))

    # --- the daemon's process -------------------------------------------------------------------

    def start(self) -> None:
        """A daemon is started as the supervisor does it; it may not come up."""
        handed_over = self.keeper.hand_over()
        has_weights = self.is_whole(handed_over)
        try:
            stored = handed_over.pop(STORED_NAME, None)
            configuration = Configuration(self.places.instance().config_file, stored)
            made = Rank(self.places.rank(), self.keeper, configuration)
            made.adopt(handed_over)
            made.begin()
        except ConfigError:
            assert not has_weights, "weights are kept from engines"
            self.end()
        except Killed:
            self.end()
        else:
            self.rank = made

    def is_whole(self, handed_over: dict[str, int]) -> bool:
        """True where there is a generation of which nothing has been given up."""
        for name, fd in handed_over.items():
            if name.endswith(".manifest"):
                digest = manifests.digest(read_sealed(fd, manifests.MAX_MANIFEST_BYTES))
                slabs = name.replace("manifest", "slab")
                if all(f"{slabs}.{n}" in handed_over for n in range(len(self.made[digest][1]))):
                    return True
        return False

    def end(self) -> None:
        """The daemon is gone, with its descriptors and its connections."""
        self.rank = self.order = None
        for engine in self.engines:
            engine.peer = None
        close_all(sorted(self.daemons_descriptors()))

    def daemons_descriptors(self) -> set[int]:
        others = {fd for _, fd in self.keeper.stored}
        others.update(fd for engine in self.engines for fd in engine.fds)
        return descriptors() - others - self.before_all

    def restart(self, before: Kept, *, instead: Sequence[str] = ()) -> None:
        """Another daemon follows one that was killed, and has everything.

        ``instead`` of what was served ``before`` it may serve one of these, where the daemon was
        killed in the middle of something.
        """
        is_safe = self.is_safe and self.all_is_stored()
        self.end()
        self.keeper.kill_in = None
        self.start()
        self.renewable = frozenset()
        if not is_safe:
            return
        now = self.kept()
        assert now.served in {before.served, *instead}
        if not instead:
            # What was not known of a generation, the new daemon may find out.
            known: dict[str, Config | None] = {
                digest: config for digest, config in before.configs.items() if config
            }
            assert now == replace(before, configs=now.configs | known)
            self.renewable, self.renewable_until = before.digests, self.clock.now + GRACE_S

    def do(
        self, work: Callable[[], T], *, instead: Callable[[], Sequence[str]] = tuple
    ) -> T | None:
        """Does ``work`` in the daemon; None where that is killed in the middle of it."""
        before = self.kept()
        try:
            outcome = work()
        except Killed:
            self.restart(before, instead=[before.served, *instead()])
            return None
        if self.alive.failed:
            assert not any(name.startswith("g") for name in self.keeper.names)
            self.end()
        return outcome

    def publish(self, config: Config, *, slabs: int = 1) -> tuple[str, object]:
        """A loader hands weights of ``config`` over; the manifest's digest and the answer."""
        described = manifest(slabs, fingerprint=held_from(config, 0))
        data = manifests.encode(described)
        fds = [create_sealed("manifest", data)]
        fds += [create_sealed("slab", bytes(SLAB_BYTES)) for _ in range(slabs)]
        digest, message = manifests.digest(data), Publish(slabs=described.slabs)
        self.made[digest] = config.model.path, self.inodes(fds[1:])
        reply = self.do(
            lambda: self.alive.publish(self.loader, message, fds), instead=lambda: [digest]
        )
        return digest, reply

    # --- what is known of it --------------------------------------------------------------------

    def kept(self) -> Kept:
        if self.rank is None:
            return Kept()
        held = self.rank._holdings
        by_number = {one.number: one.manifest_digest for one in held}
        return Kept(
            served=held.served.manifest_digest if held.served else "",
            held=by_number.get(held.held or 0, ""),
            candidate=held.candidate,
            digests=frozenset(by_number.values()),
            configs={told.manifest_digest: told.config for told in held.reports()},
        )

    def all_is_stored(self) -> bool:
        """As far as the daemon knows."""
        keeping = self.alive._holdings._safekeeping
        return not keeping.problem and keeping._config_again_at == math.inf

    # --- what must be true ----------------------------------------------------------------------

    def check(self) -> None:
        """After each step."""
        if self.rank is None:
            return
        by_number = {}
        for one in self.rank._holdings:
            by_number[one.number] = one.manifest_digest
            assert self.inodes(one.slab_fds) == self.made[one.manifest_digest][1], "mixed"
        for engine in self.engines:
            if engine.peer is not None:
                assert by_number[self.rank._leases[engine.peer].generation] == engine.digest
        assert loads(self.rank.state) == (self.rank._loading.under_way is not None)
        served, ready = self.rank._holdings.served, self.places.rank().ready_file
        assert serves(self.rank.state) == ready.exists() == (served is not None)
        if served is not None:
            assert msgspec.json.decode(ready.read_bytes())["generation"] == served.number

    def check_settled(self) -> None:
        """Once the supervisor has heard everything: it has just what the daemon has."""
        if self.rank is None:
            return
        assert self.all_is_stored()
        self.is_safe = True
        report, held = self.rank.report(), self.rank._holdings
        encode_frame(report)
        wanted = {name for one in (*held, *held.unread) for name, _ in one.named_fds()}
        assert {name for name in self.keeper.names if name.startswith("g")} == wanted
        assert len(self.keeper.names) == len(set(self.keeper.names)) == report.expected_fds
        offered = len(self.rank.reclaim.fds)
        assert len(self.daemons_descriptors()) == report.expected_fds + offered, "a leak"

    def inodes(self, fds: Sequence[int]) -> tuple[int, ...]:
        return tuple(os.fstat(fd).st_ino for fd in fds)

    def close(self) -> None:
        self.end()
        for engine in self.engines:
            close_all(engine.fds)
        self.keeper.lose()
        shutil.rmtree(self.places.root)


def descriptors() -> set[int]:
    """All that this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - of what lies there only the names
        with contextlib.suppress(OSError):
            os.fstat(int(name))
            found.add(int(name))
    return found
