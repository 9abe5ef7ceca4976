"""What a daemon wants loaded: asking it, and whether the checkpoint still is what it was."""

import shlex
import time

from wcache.checkpoint import Checkpoint, Identity
from wcache.config import Config
from wcache.errors import CheckpointError, ProtocolError
from wcache.load.report import Inquiry, ProgressReport, failure_told
from wcache.protocol.messages import (
    MAX_TEXT,
    AskAgain,
    AskLoad,
    Checked,
    CheckOrder,
    LoadOrder,
    LoadSource,
    Message,
    NothingToLoad,
    Published,
)
from wcache.protocol.wire import close_all

PUBLISH_S = 300.0
"""How long a daemon may take to accept weights: it checks every descriptor, and waits for its
supervisor to have stored them."""
# For the daemon's next word on what is wanted, whatever it says.
_LONGEST_WAIT_S = 1.0


def ask_load(control: Inquiry, source: LoadSource) -> LoadOrder | NothingToLoad:
    """What the daemon wants loaded; raises what its refusal stands for.

    It may want bytes checked first that an engine has given back: when they are the right ones
    nothing is left to load.
    """
    reply = control.request(AskLoad(source=source), Message)
    while not isinstance(reply, LoadOrder | NothingToLoad):
        if isinstance(reply, AskAgain):
            time.sleep(min(max(0.0, reply.after_s), _LONGEST_WAIT_S))
            reply = control.request(AskLoad(source=source), Message)
        elif isinstance(reply, CheckOrder):
            reply = control.request(Checked(problem=_check(control, reply)), Message)
        elif isinstance(reply, Published):
            words = f"generation {reply.generation} was given back by an engine, and is right"
            reply = NothingToLoad(message=words)
        else:
            raise ProtocolError(f"answer is a {type(reply).__name__}, not a LoadOrder")
    return reply


def _check(control: Inquiry, order: CheckOrder) -> str:
    from wcache.load.check import problem_of

    fds = control.take_fds(1 + len(order.slabs))
    try:
        with failure_told(control):
            return problem_of(order, fds, ProgressReport(control))[:MAX_TEXT]
    finally:
        close_all(fds)


def check_content(config: Config, checkpoint: Checkpoint, identity: Identity) -> None:
    """Raises :class:`CheckpointError` when this is another checkpoint than ``up`` recorded."""
    recorded = config.model.content
    if recorded is not None and recorded != identity.digest:
        named = shlex.quote(config.model.hub_id or config.model.path)
        raise CheckpointError(
            f"checkpoint {checkpoint.path} is not the one that `wcache up` saw:"
            f" it is {identity.digest[:19]}, {recorded[:19]} was recorded",
            hint=f"wcache up --model {named} takes the new one",
        )
