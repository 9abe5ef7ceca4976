"""All that may happen to a rank: to its daemon, by its operator, loaders, engines, supervisor."""

import os
from collections.abc import Callable
from random import Random

from tests.changeover import model
from tests.life.body import Body, Engine
from tests.life.keeper import Clock
from tests.places import publish_config
from wcache.fingerprint import held_from
from wcache.protocol.messages import (
    AskLoad,
    Attach,
    Attached,
    Checked,
    CheckOrder,
    Leased,
    LoadFailed,
    LoadOrder,
    LoadSource,
    Offer,
    Offered,
    OfferWanted,
    Progress,
    Published,
    Refused,
    Release,
    Released,
    Renew,
    Stage,
    Switch,
    Switched,
)
from wcache.protocol.reports import GenerationRole, LeaseReport
from wcache.protocol.wire import close_all

LETTERS = "abc"
MAX_ENGINES = 4
LEASE = LeaseReport(pid=os.getpid(), uid=0, command="engine", generation=0, since=0.0)


class Life(Body):
    """Steps are taken by chance, of which each draws what it leaves open.

    Most of what is asked has an answer: a life in which everything is refused tells little.
    """

    def begin(self, chance: Random) -> None:
        self.write_config(chance.choice(LETTERS))
        self.start()
        self.load(chance)
        self.attach(chance)

    # --- the operator ---------------------------------------------------------------------------

    def configure(self, chance: Random) -> None:
        kind = chance.random()
        if kind < 0.6:
            self.write_config(chance.choice(LETTERS))
        elif kind < 0.8:
            self.places.write_config(publish_config())
        else:
            self.places.instance().config_file.write_text("[model\n")

    def start_again(self, chance: Random) -> None:
        if self.rank is None:
            self.start()

    def stage(self, chance: Random) -> None:
        if self.rank is not None:
            message = Stage(config=model(chance.choice(LETTERS)), load=chance.random() < 0.8)
            self.do(lambda: self.alive.change(message))

    def switch(self, chance: Random) -> None:
        staged = self.rank._holdings.staged if self.rank else None
        if staged is None:
            return
        message = Switch(generation=staged.number, keep_old=chance.random() < 0.5)
        digest = staged.manifest_digest
        reply = self.do(lambda: self.alive.change(message), instead=lambda: [digest])
        if isinstance(reply, Switched):
            assert self.kept().served == digest

    def change_over(self, chance: Random) -> None:
        """``up`` or ``warm`` of other weights, as far as it gets."""
        self.stage(chance)
        if self.rank is not None and self.rank._holdings.candidate is not None:
            self.load(chance)
        if chance.random() < 0.7:
            self.switch(chance)

    def release(self, chance: Random) -> None:
        roles: list[tuple[GenerationRole, ...]] = [("staged",), ("held",), ("staged", "held")]
        if self.rank is not None:
            message = Release(roles=chance.choice(roles))
            self.do(lambda: self.alive.change(message))

    def free(self, chance: Random) -> None:
        """``up --replace``: the weights are freed before others are loaded."""
        while self.engines and chance.random() < 0.8:
            self.end_engine(chance)
        if self.rank is None:
            return
        message = Release(roles=("serving",))
        leased = any(engine.peer is not None for engine in self.engines)
        # Killed in the middle of it, any generation may be left, or none.
        reply = self.do(lambda: self.alive.change(message), instead=lambda: ["", *self.made])
        if isinstance(reply, Released):
            assert not leased
            assert self.kept().served == ""
            self.write_config(chance.choice(LETTERS))
            self.load(chance)

    # --- loaders --------------------------------------------------------------------------------

    def ask_load(self, chance: Random) -> None:
        if self.rank is None or self.order is not None:
            return
        self.loader = self.new_peer()
        source: LoadSource = "engine" if self.alive.awaits_engine else "checkpoint"
        if chance.random() < 0.1:
            source = chance.choice(["engine", "checkpoint"])
        message = AskLoad(source=source, repair=chance.random() < 0.2)
        reply = self.do(lambda: self.alive.ask_load(self.loader, os.getpid(), message))
        if isinstance(reply, LoadOrder | CheckOrder):
            self.order = reply

    def finish_load(self, chance: Random) -> None:
        if isinstance(self.order, LoadOrder):
            self._publish(chance, self.order)
        elif isinstance(self.order, CheckOrder):
            self._say_what_was_found(chance, self.order)

    def load(self, chance: Random) -> None:
        self.ask_load(chance)
        self.finish_load(chance)

    def _publish(self, chance: Random, order: LoadOrder) -> None:
        is_right = chance.random() < 0.85
        config = order.config if is_right else model("d")
        self.order = None
        digest, reply = self.publish(config, slabs=chance.randint(1, 3))
        if isinstance(reply, Published):
            assert is_right
            assert digest in self.kept().digests

    def _say_what_was_found(self, chance: Random, order: CheckOrder) -> None:
        message = Checked(problem="" if chance.random() < 0.8 else "storage 0 is damaged")
        digest, self.order = order.manifest_digest, None
        reply = self.do(lambda: self.alive.checked(self.loader, message), instead=lambda: [digest])
        if isinstance(reply, Published):
            assert not message.problem
            assert self.kept().served == digest

    def report_progress(self, chance: Random) -> None:
        if self.order is not None:
            message = Progress(phase="read", done_bytes=chance.randrange(9), total_bytes=9)
            assert self.do(lambda: self.alive.progress(self.loader, message)) is None

    def fail_load(self, chance: Random) -> None:
        if self.order is None:
            return
        self.order = None
        if chance.random() < 0.5:
            self.do(lambda: self.alive.load_failed(self.loader, LoadFailed(message="disk")))
        else:
            self.do(lambda: self.alive.peer_gone(self.loader))

    # --- engines --------------------------------------------------------------------------------

    def attach(self, chance: Random) -> None:
        if self.rank is None or len(self.engines) == MAX_ENGINES:
            return
        peer = self.new_peer()
        letter = chance.choice(LETTERS) if chance.random() < 0.4 else ""
        message = Attach(wanted=held_from(model(letter), 0) if letter else None)
        outcome = self.do(lambda: self.alive.attach(peer, LEASE, message))
        if outcome is None:
            return
        reply, fds = outcome
        if not isinstance(reply, Attached):
            assert not fds
            return
        path, inodes = self.made[reply.manifest_digest]
        assert not letter or path == model(letter).model.path
        assert self.inodes(fds[1:]) == inodes
        mine = [os.dup(fd) for fd in fds]
        self.engines.append(Engine(reply.manifest_digest, mine, reply.slabs, peer))

    def end_engine(self, chance: Random) -> None:
        if not self.engines:
            return
        engine = self.engines.pop(chance.randrange(len(self.engines)))
        close_all(engine.fds)
        if self.rank is not None and (peer := engine.peer) is not None:
            self.do(lambda: self.alive.peer_gone(peer))

    def renew(self, chance: Random) -> None:
        """Engines that have noticed the new daemon take up their leases."""
        for engine in list(self.engines):
            if self.rank is not None and engine.peer is None and chance.random() < 0.8:
                self._renew(engine, is_trusted=chance.random() < 0.8)

    def _renew(self, engine: Engine, *, is_trusted: bool) -> None:
        peer = self.new_peer()
        message = Renew(manifest_digest=engine.digest, can_offer=True)
        reply = self.do(lambda: self.alive.renew(peer, LEASE, message, trusted=is_trusted))
        if isinstance(reply, Leased):
            engine.peer = peer
        elif isinstance(reply, OfferWanted):
            assert is_trusted
            offer, fds = Offer(slabs=engine.slabs), [os.dup(fd) for fd in engine.fds]
            taken = self.do(lambda: self.alive.offer(LEASE, offer, fds, trusted=True))
            assert taken is None or isinstance(taken, Offered)
        elif isinstance(reply, Refused) and self.clock.now < self.renewable_until:
            assert engine.digest not in self.renewable, "a generation that is leased was freed"

    # --- the daemon and its supervisor ----------------------------------------------------------

    def wait(self, chance: Random) -> None:
        self.clock.now += chance.choice([1, 1, 4, 11, 31, 61])
        if self.rank is not None:
            self.do(self.housekeep)

    def housekeep(self) -> None:
        """What the daemon's loop does every second."""
        self.alive.refresh_configuration()
        self.alive.store_what_is_not()
        self.alive.free_drained()
        self.alive.record()
        self.alive.say_status()
        self.alive.report()

    def kill(self, chance: Random) -> None:
        if self.rank is not None:
            self.restart(self.kept())
            self.wait(chance)
            self.renew(chance)

    def kill_later(self, chance: Random) -> None:
        """In the middle of whatever it does then."""
        self.keeper.kill_in = chance.randrange(16)

    def deafen(self, chance: Random) -> None:
        if chance.random() < 0.5:
            self.keeper.deaf_for = chance.randint(1, 8)
        else:
            self.keeper.listens = False

    def listen(self, chance: Random) -> None:
        self.keeper.listens = True

    def replace_supervisor(self, chance: Random) -> None:
        """One that was killed leaves nothing; the next one asks the daemon for what it has."""
        if self.rank is None:
            return
        self.keeper.lose()
        self.is_safe = False
        if chance.random() < 0.3:
            self.keeper.deaf_for = chance.randint(1, 8)
        daemon = self.rank
        self.do(self.alive.store_again)
        # What it could not say, it knows of.
        self.is_safe = self.rank is daemon

    def lose_everything(self, chance: Random) -> None:
        """Supervisor and daemon are killed: only engines have the weights yet."""
        if self.rank is None or not self.engines:
            return
        self.keeper.lose()
        self.is_safe = False
        self.restart(self.kept())
        self.is_safe = True
        self.renew(chance)
        self.load(chance)
        self.renew(chance)

    def settle(self, chance: Random) -> None:
        self.keeper.recover()
        for _ in range(4):
            self.clock.now += 31
            if self.rank is not None:
                self.do(self.housekeep)
        self.check_settled()


Step = Callable[[Life, Random], None]

STEPS: dict[Step, int] = {
    Life.change_over: 8,
    Life.attach: 6,
    Life.kill: 6,
    Life.wait: 6,
    Life.free: 4,
    Life.load: 4,
    Life.renew: 4,
    Life.switch: 4,
    Life.configure: 3,
    Life.deafen: 3,
    Life.end_engine: 3,
    Life.kill_later: 3,
    Life.listen: 3,
    Life.release: 3,
    Life.start_again: 3,
    Life.ask_load: 2,
    Life.fail_load: 2,
    Life.finish_load: 2,
    Life.lose_everything: 2,
    Life.replace_supervisor: 2,
    Life.settle: 2,
    Life.stage: 2,
    Life.report_progress: 1,
}
"""How often each is taken, beside the others."""


def live(seed: int, clock: Clock, steps: int = 80) -> None:
    """One life; an error in it says by which steps it came about."""
    chance = Random(seed)
    life = Life(clock)
    taken: list[str] = []
    try:
        life.begin(chance)
        life.check()
        for step in chance.choices(list(STEPS), list(STEPS.values()), k=steps):
            taken.append(step.__name__)
            step(life, chance)
            life.check()
        life.settle(chance)
    except BaseException as error:
        error.add_note(f"seed {seed}, after {', '.join(taken)}")
        raise
    finally:
        life.close()
