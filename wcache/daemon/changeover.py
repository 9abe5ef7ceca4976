"""How a rank comes to other weights: by an operator's word, and by what a loader is ordered."""

import logging
from collections.abc import Collection

from wcache.config import check_config
from wcache.daemon import answers
from wcache.daemon.holdings import Holdings
from wcache.daemon.load import Load
from wcache.errors import ConfigError
from wcache.fingerprint import wanted_by
from wcache.paths import RankId
from wcache.protocol.messages import (
    AskLoad,
    NothingToLoad,
    Refused,
    Release,
    Released,
    Stage,
    Staged,
    Switch,
    Switched,
)
from wcache.protocol.reports import LeaseReport

log = logging.getLogger(__name__)


Change = Stage | Switch | Release
Changed = Staged | Switched | Released


def change(
    rank: RankId,
    holdings: Holdings,
    load: Load | None,
    leases: Collection[LeaseReport],
    message: Change,
) -> Changed | Refused:
    """Does what ``message`` asks for, as far as it can be done just now."""
    match message:
        case Stage():
            return stage(rank, holdings, load, message)
        case Switch():
            return switch(rank, holdings, load, message)
        case Release():
            return release(rank, holdings, load, leases, message)


def nothing_to_load(
    rank: RankId, holdings: Holdings, message: AskLoad, is_wanted: bool
) -> NothingToLoad | Refused | None:
    """Why a loader has nothing to load just now; None when it has.

    ``is_wanted``: what is served is what the configuration wants.
    """
    if message.repair and holdings.candidate is not None:
        return answers.not_now(rank)
    if message.repair:
        return None if is_wanted else answers.nothing_to_repair(rank)
    if holdings.served is None:
        return None
    if holdings.staged is not None:
        return answers.staged_already(rank, holdings.staged.number)
    if holdings.candidate is not None:
        return None
    if is_wanted:
        return answers.nothing_to_load(rank, holdings.served.number)
    if message.source == "checkpoint":
        return answers.nothing_by_itself(rank, holdings.served.number)
    return None


def stage(rank: RankId, holdings: Holdings, load: Load | None, message: Stage) -> Staged | Refused:
    """Makes the configuration of ``message`` the candidate, unless its weights are served."""
    try:
        config = check_config(message.config, source="what is to be staged")
    except ConfigError as error:
        return Refused(reason="invalid", message=error.message)
    if rank.rank not in range(config.ranks.world_size):
        words = f"what is to be staged has {config.ranks.world_size} ranks"
        return Refused(reason="invalid", message=f"{words}, and none with number {rank}")
    wanted = wanted_by(config, rank.rank)
    if load is not None:
        if holdings.staging != wanted:
            return answers.busy(load)
        return Staged(generation=load.generation, step="loading")
    found = holdings.matching(wanted)
    if found is not None and found is holdings.served:
        holdings.give_up_candidate()
        return Staged(generation=found.number, step="serving")
    if found is None and not message.load:
        return answers.not_held(rank)
    if found is None and (holdings.served is None or config.model.loader == "publish"):
        return answers.not_beside(rank, holdings.served is None)
    holdings.stage(config)
    if found is None:
        log.info("an operator has %s loaded beside what is served", config.model.path)
        return Staged(generation=holdings.next_number, step="load")
    return Staged(generation=found.number, step="staged")


def switch(
    rank: RankId, holdings: Holdings, load: Load | None, message: Switch
) -> Switched | Refused:
    """Serves what is staged; the same request again changes nothing."""
    old, staged = holdings.served, holdings.staged
    if old is not None and old.number == message.generation:
        return Switched(generation=old.number)
    if load is not None:
        return answers.busy(load)
    if staged is None or staged.number != message.generation:
        return answers.not_staged(rank, message.generation)
    hold = old.number if old is not None and message.keep_old else None
    holdings.serve(staged.number, hold=hold)
    log.info("serving generation %s, by an operator's word", staged.in_words())
    return Switched(generation=staged.number)


def release(
    rank: RankId,
    holdings: Holdings,
    load: Load | None,
    leases: Collection[LeaseReport],
    message: Release,
) -> Released | Refused:
    """Gives generations up by their role; what is not served is freed once nobody leases it."""
    if "serving" in message.roles:
        if load is not None:
            return answers.busy(load)
        if leases:
            return answers.leased(rank, len(leases))
        if holdings.grace_s:
            return answers.in_grace(rank, holdings.grace_s)
        given_up = list(holdings)
        released = Released(
            generations=tuple(held.number for held in given_up),
            slab_bytes=sum(held.slab_bytes for held in given_up),
        )
        log.warning("an operator frees the weights that are served to make room for others")
        holdings.give_up_all()
        return released
    given_up = [held for held in holdings if holdings.role(held) in message.roles]
    if "staged" in message.roles:
        holdings.give_up_candidate()
    if "held" in message.roles:
        holdings.give_up_held()
    # What was staged may be held for going back as well, and then stays.
    given_up = [held for held in given_up if holdings.role(held) == "draining"]
    return Released(
        generations=tuple(held.number for held in given_up),
        slab_bytes=sum(held.slab_bytes for held in given_up),
    )
