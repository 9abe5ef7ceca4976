"""One ``wcache warm``: everything is checked first; then all ranks load, and all of them switch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from wcache.checkpoint import IdentityCache
from wcache.config import Config, load_config
from wcache.errors import NotReadyError, WcacheError
from wcache.holdings import Others
from wcache.output import Output
from wcache.paths import InstancePaths
from wcache.protocol.messages import Release, Released
from wcache.ranks import RankView, known_ranks, rank_words, view
from wcache.rollout import follow, orders, previous, together
from wcache.rollout.candidate import candidate, checkpoint_of
from wcache.rollout.up_job import Free, needs
from wcache.rollout.wanted import Args, why_not_again
from wcache.rollout.warm_plan import STAGED, WarmPlan, decide
from wcache.rollout.write import write_config
from wcache.supervise.interface import Supervisor
from wcache.units import size


@dataclass(frozen=True, kw_only=True, slots=True)
class Warming:
    """What was found possible, or why it is not; nothing has been touched yet."""

    paths: InstancePaths
    supervisor: Supervisor
    out: Output
    config: Config
    old: Config
    plan: WarmPlan
    before: Mapping[int, RankView]

    def stage(self, timeout_s: float | None) -> dict[int, str]:
        """Has the new weights loaded beside the old; returns the reason of each that failed.

        Nothing is switched, whatever happens. After a failure what was loaded is given up.
        """
        staged = self.plan.staged
        if load := together.order(self.paths, staged, self.config):
            self.supervisor.load(load)
        failures = self._follow(staged, timeout_s)
        if failures:
            together.give_up(self.paths, staged)
        return failures

    def switch(self, *, keep_old: bool) -> None:
        """Writes the configuration, and has every rank serve what was loaded.

        Raises :class:`WcacheError`, before anything is switched, when a restart of a daemon could
        lose what is to be served.
        """
        numbers = together.loaded(self.paths, self.supervisor, self.plan.staged, self.config)
        self.save()
        together.switch(self.paths, numbers, keep_old=keep_old)

    def free(self) -> None:
        """For ``--replace``: leaves ranks empty. The configuration to go back to is saved first."""
        ranks = self.plan.having("replace")
        self._save_previous()
        _, errors = orders.try_all(
            self.paths, ranks, lambda _: Release(roles=("serving",)), Released
        )
        if errors:
            freed = [rank for rank in ranks if rank not in errors]
            error = next(iter(errors.values()))
            emptied = f"; {rank_words(freed)} freed: wcache warm loads the old weights again"
            raise WcacheError(error.message + (emptied if freed else ""), hint=error.hint)

    def fill(self, timeout_s: float | None) -> dict[int, str]:
        """Loads ranks that serve nothing; returns the reason of each that failed."""
        self.save()
        ranks = self.plan.having("fill", "replace")
        load = [rank for rank in ranks if not self._is_loading(rank)]
        if load:
            self.supervisor.load(load)
        return self._follow(ranks, timeout_s)

    def save(self) -> None:
        """Writes the configuration, if it is not what the file says, and the one before it."""
        if not self.plan.having("replace"):
            self._save_previous()
        if self.config != self.old:
            write_config(self.config, self.paths.config_file)

    def _save_previous(self) -> None:
        """The configuration of what is served until now, beside that of what will be."""
        changed = [self.before[rank] for rank in self.plan.having(*STAGED, "replace")]
        previous.save(self.paths, changed, self.old)

    def _is_loading(self, rank: int) -> bool:
        report = self.before[rank].report
        return report is not None and report.progress is not None

    def _follow(self, ranks: Iterable[int], timeout_s: float | None) -> dict[int, str]:
        try:
            return follow.follow(
                self.paths, self.config, self.supervisor, self.before, ranks,
                timeout_s=timeout_s, out=self.out,
            )  # fmt: skip
        except NotReadyError as error:
            error.hint = (
                "loading goes on, and nothing is switched: wcache warm with the same options goes"
                " on with it, wcache rollback --drop gives it up"
            )
            raise


def prepare(
    args: Args,
    paths: InstancePaths,
    supervisor: Supervisor,
    out: Output,
    *,
    named: Iterable[int] = (),
    go_back: bool = False,
    replace: bool = False,
) -> Warming:
    """Finds out what has to be done to ``named`` ranks, or to all, and touches nothing.

    Raises :class:`WcacheError` when there is no telling.
    """
    old = load_config(paths.config_file)
    wanted = candidate(args, old, paths, previous=go_back)
    config = wanted.config
    local = config.ranks.local_ranks()
    everywhere = view(paths, sorted({*local, *known_ranks(paths)}), supervisor)
    _check_is_whole(everywhere, config, set(named))
    ranks = sorted(named) or list(local)
    views = {rank: everywhere[rank] for rank in ranks}
    taken = {}
    up = [one for one in views.values() if one.report is not None]
    if any(one.holding(config) is None or _moved(one, config) for one in up):
        found = needs(checkpoint_of(wanted, paths), config, paths, out)
        taken = {need.rank: need for need in found}
    elif up and (why := why_not_again(config, IdentityCache(paths.identity_folder))):
        out.warn(why)
    plan = decide(
        paths.instance,
        views,
        config,
        replace=replace,
        needs=taken,
        free=Free(),
        others=Others(paths),
    )
    if config.model.hub_id:
        out.say(f"{config.model.hub_id} at {config.model.revision} is in {config.model.path}")
    return Warming(
        paths=paths, supervisor=supervisor, out=out, config=config, old=old, plan=plan,
        before=views,
    )  # fmt: skip


def _moved(one: RankView, config: Config) -> bool:
    """True when the configuration names another folder than what is held was loaded from.

    Somebody has changed the path by hand: the digest beside it must be that of what lies there.
    """
    held = one.holding(config)
    return (
        held is not None
        and held.config is not None
        and (held.config.model.path, held.config.model.hub_id)
        != (config.model.path, config.model.hub_id)
    )


def _check_is_whole(views: Mapping[int, RankView], config: Config, named: set[int]) -> None:
    """Raises when some ranks would serve other weights than the others afterwards."""
    local = set(config.ranks.local_ranks())
    leaving = [rank for rank, one in views.items() if rank not in local and one.is_up]
    if leaving:
        raise WcacheError(
            f"{rank_words(leaving)} of another layout would stay up", hint="wcache up changes it"
        )
    if not named:
        return
    others = [rank for rank in sorted(local - named) if not views[rank].serves(config)]
    if others:
        raise WcacheError(
            f"{rank_words(others)} would go on with other weights than {rank_words(named)}",
            hint="leave the ranks out: all of them switch together",
        )


def outcome(now: Mapping[int, RankView]) -> Iterable[str]:
    """A line for each rank: what it serves, and what becomes of what it served."""
    for rank, one in now.items():
        serving = one.serving
        if serving is None or one.report is None:
            continue
        said = [f"generation {serving.number} is served, {size(serving.weight_bytes)}"]
        for held in one.report.generations:
            count = one.leases_on(held.number)
            leases = f"{count} {'lease' if count == 1 else 'leases'}"
            if held.role == "draining":
                said.append(f"generation {held.number} drains, {leases}")
            elif held.role == "held":
                said.append(f"generation {held.number} is held for rollback, {leases}")
        yield f"rank {rank}: {'; '.join(said)}"
