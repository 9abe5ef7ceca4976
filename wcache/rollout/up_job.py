"""One ``wcache up``: everything is checked first, and then done."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from wcache.checkpoint import Checkpoint, IdentityCache
from wcache.config import Config, load_config
from wcache.errors import TryAgainError, WcacheError
from wcache.fingerprint import wanted_by
from wcache.fp8 import BLOCK, WEIGHT_DTYPE
from wcache.holdings import Others
from wcache.machine import devices
from wcache.memory.available import available_bytes
from wcache.memory.descriptor import SLAB_GRANULARITY
from wcache.memory.slab import slab_sizes
from wcache.output import Output
from wcache.paths import InstancePaths
from wcache.protocol.control import COMES_BACK_S
from wcache.ranks import RankView, first_of, holders, known_ranks, rank_words, read_config, view
from wcache.rollout import follow, previous, together
from wcache.rollout.up_plan import (
    LOADER_CONTEXT_BYTES,
    QUANTIZING_BYTES,
    Need,
    Rollout,
    check_memory,
    check_slab_counts,
    decide,
)
from wcache.rollout.wanted import Args, Wanted, from_config, from_model, why_not_again
from wcache.rollout.write import write_config
from wcache.served import read_served
from wcache.supervise.interface import Supervisor
from wcache.units import size

GOES_ON = "wcache up again goes on with it, wcache rollback --drop gives it up"
_PAUSE_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What was found possible; nothing has been touched yet."""

    paths: InstancePaths
    supervisor: Supervisor
    out: Output
    config: Config
    old: Config | None
    rollout: Rollout
    before: Mapping[int, RankView]

    def begin(self) -> None:
        """Writes the configuration, then starts and loads what is to be started and loaded."""
        written = self.config != self.old
        if written:
            previous.save(self.paths, [self.before[rank] for rank in self.rollout.load], self.old)
            write_config(self.config, self.paths.config_file)
        try:
            if self.rollout.start:
                self.supervisor.start(self.rollout.start)
            if self.rollout.load:
                together.order(self.paths, self.beside, self.config)
                self.supervisor.load(self.rollout.load)
        except WcacheError:
            if written:
                self.out.warn(
                    f"{self.paths.config_file} is written, but the ranks were not started:"
                    " wcache up, without --model, tries again"
                )
            raise

    def follow(self, timeout_s: float | None) -> dict[int, str]:
        """Waits for the weights; returns the reason of each rank that failed.

        Ranks that served other weights switch to the new ones when none has failed: else an
        engine would get those of two models.
        """
        failures = follow.follow(
            self.paths,
            self.config,
            self.supervisor,
            self.before,
            self.rollout.pending,
            timeout_s=timeout_s,
            out=self.out,
        )
        beside = self.beside
        if failures:
            together.give_up(self.paths, beside)
        elif beside:
            together.switch(
                self.paths, together.loaded(self.paths, self.supervisor, beside, self.config)
            )
            words = "serves" if len(beside) == 1 else "serve"
            self.out.say(f"{rank_words(beside)} {words} the new weights")
        return failures

    @property
    def beside(self) -> list[int]:
        """Ranks whose new weights are loaded beside others, which are served until then."""
        if self.config.model.loader == "publish":
            return []
        waited = (*self.rollout.load, *self.rollout.under_way)
        return sorted(rank for rank in waited if self.before[rank].serving is not None)

    def serving_others(self) -> list[int]:
        """Ranks that still serve other weights than those asked for: where an engine publishes,
        nothing is loaded in their place."""
        now = view(self.paths, self.config.ranks.local_ranks(), None)
        return [rank for rank, one in now.items() if one.differences(self.config)]

    def leave(self) -> None:
        """For one who is interrupted while he waits: what was begun goes on, and is said to."""
        self.enable()
        if self.beside:
            self.out.say(f"loading goes on, and nothing is switched: {GOES_ON}")
        else:
            self.out.say("loading goes on: wcache status shows how far it is, wcache down ends it")

    def enable(self, failed: Iterable[int] = ()) -> None:
        """Has a reboot load the ranks again, but those that ``failed``."""
        local = self.config.ranks.local_ranks()
        try:
            self.supervisor.enable(sorted(set(local).difference(failed)))
        except WcacheError as error:
            # The weights are there, which is what was asked for first.
            self.out.warn(f"a reboot will not load them again: {error.message}")

    def stop_leaving(self) -> None:
        """Stops ranks that the layout does not have any more, if nobody came to use them since."""
        leaving = self.rollout.leaving
        if not leaving:
            return
        now = view(self.paths, leaving, self.supervisor)
        used = holders(now.values())
        if used:
            raise WcacheError(
                f"{rank_words(leaving)} of the old layout stay: {first_of(used)}",
                hint=f"stop these engines, then: wcache down {' '.join(map(str, leaving))}",
            )
        self.supervisor.disable(leaving)
        self.supervisor.stop(leaving)
        freed = sum(one.held_bytes for one in now.values())
        self.out.say(f"{rank_words(leaving)} of the old layout down, {size(freed)} freed")


def prepare(args: Args, paths: InstancePaths, supervisor: Supervisor, out: Output) -> Job:
    """Finds out all that could keep ``args`` from being done; raises it, and touches nothing."""
    old = read_config(paths)  # a bad one is not written anew: it says who may attach
    wanted = _wanted(args, paths, old, out)
    config = wanted.config
    local = config.ranks.local_ranks()
    views = _asked(paths, {*local, *known_ranks(paths)}, supervisor, is_patient=config != old)
    rollout = Rollout()
    if all(views[rank].serves(config) for rank in local):
        rollout = decide(views, config)
        out.say(f"{rank_words(local)} {'holds' if len(local) == 1 else 'hold'} the wanted weights")
        if why := why_not_again(config, IdentityCache(paths.identity_folder)):
            out.warn(why)
    else:
        back = _coming_back(paths, views, config)
        # A configuration that is there already need not have its checkpoint there as well, as
        # long as nothing is to be loaded: that is why this is not looked at earlier.
        if args.model is None and not all(views[r].serves(config) or r in back for r in local):
            wanted = from_config(config, identities=IdentityCache(paths.identity_folder))
        taken = needs(wanted.checkpoint, config, paths, out)
        rollout = decide(views, config)
        # What an up that was interrupted has loaded has its memory already.
        held = [rank for rank in rollout.load if views[rank].holding(config) is not None]
        to_load = {*rollout.load, *rollout.fresh}.difference(back, held)
        if back:
            out.say(f"{rank_words(back)}: engines that still have the weights give them back")
        loaded = [need for need in taken if need.rank in to_load]
        check_memory(loaded, Free(), views, Others(paths))
        check_slab_counts(loaded)
    _warn_of_persistence(config, out)
    return Job(
        paths=paths, supervisor=supervisor, out=out, config=config, old=old, rollout=rollout,
        before=views,
    )  # fmt: skip


def _asked(
    paths: InstancePaths, ranks: Iterable[int], supervisor: Supervisor, *, is_patient: bool
) -> dict[int, RankView]:
    """All that is known of ``ranks``; ``is_patient`` waits for those whose daemon comes back.

    Raises :class:`TryAgainError` when one does not: what it holds, and who uses that, must be known
    before it is to hold something else.
    """
    deadline = time.monotonic() + COMES_BACK_S
    while True:
        views = view(paths, sorted(ranks), supervisor)
        gone = [rank for rank, one in views.items() if one.comes_back]
        if not gone or not is_patient:
            return views
        if time.monotonic() > deadline:
            raise TryAgainError(
                f"{rank_words(gone)} can not be asked what is held: the daemon does not listen",
                hint=f"wcache logs {gone[0]} says why; its weights are kept, wcache down --force"
                " frees them",
            )
        time.sleep(_PAUSE_S)


def _coming_back(paths: InstancePaths, views: Mapping[int, RankView], config: Config) -> list[int]:
    """Ranks without weights whose engines may live: what they have mapped is taken back."""
    found = []
    for rank in config.ranks.local_ranks():
        report = views[rank].report
        if report is not None and (report.generations or report.progress is not None):
            continue
        try:
            served = read_served(paths.rank(rank).served_file)
        except WcacheError:
            continue  # the daemon says so, and loads
        if served is not None and served.may_come_back(wanted_by(config, rank)):
            found.append(rank)
    return found


def _wanted(args: Args, paths: InstancePaths, old: Config | None, out: Output) -> Wanted:
    if args.model is None:
        return Wanted(config=old or load_config(paths.config_file), checkpoint=None)
    visible = () if args.device == "cpu" else devices.visible_gpus()
    identities = IdentityCache(paths.identity_folder)
    wanted = from_model(args, args.model, old, visible, identities=identities)
    model = wanted.config.model
    if model.hub_id:
        out.say(f"{model.hub_id} at {model.revision} is in {model.path}")
    return wanted


def needs(
    checkpoint: Checkpoint | None, config: Config, paths: InstancePaths, out: Output
) -> list[Need]:
    """What every rank of this node will take; raises when one of them can not be made."""
    if checkpoint is None:
        return []
    from wcache.load.architectures import Architectures
    from wcache.load.placement import placement

    architectures = Architectures(paths.architecture_folder, tell=out.say)
    uuids, layout = config.memory.devices, config.ranks
    found = []
    has_fp8 = False
    spread = placement(checkpoint, config, architectures)
    for ranks, planned in spread.of_each_stage(layout.local_ranks()):
        has_fp8 = has_fp8 or any(target.dtype == WEIGHT_DTYPE for target in planned.targets)
        sizes = slab_sizes(planned.total_bytes, config.memory.slab_bytes, SLAB_GRANULARITY)
        nbytes = sum(sizes)
        on_gpu = config.memory.device == "cuda"
        if on_gpu:
            nbytes += LOADER_CONTEXT_BYTES
            if any(target.scale is not None for target in planned.targets):
                nbytes += QUANTIZING_BYTES
        for rank in ranks:
            device = uuids[layout.coordinates(rank).local_rank] if on_gpu else "cpu"
            found.append(Need(rank=rank, device=device, nbytes=nbytes, slabs=len(sizes)))
    if config.model.quantization == "fp8" and not has_fp8:
        out.warn(
            "--quantization fp8 changes nothing: no linear layer of this model has dimensions that"
            f" are multiples of {BLOCK}"
        )
    return sorted(found, key=lambda need: need.rank)


class Free(dict[str, int]):
    """Free bytes by device, asked for when they are needed."""

    def __missing__(self, device: str) -> int:
        self[device] = available_bytes() if device == "cpu" else devices.gpu(device).free_bytes
        return self[device]


def _warn_of_persistence(config: Config, out: Output) -> None:
    for uuid in config.memory.devices:
        gpu = devices.gpu(uuid)
        if gpu.persistence is False:
            out.warn(
                f"persistence mode is off on GPU {gpu.index} ({uuid}): its weights are lost when"
                f" its last user ends; nvidia-smi -i {gpu.index} -pm 1 turns it on"
            )
