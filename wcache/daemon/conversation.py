"""What a peer may say when, and what it is answered."""

import time

from wcache.daemon.access import may, may_command
from wcache.daemon.connection import Connection
from wcache.daemon.rank import Rank
from wcache.daemon.refusals import Refusals
from wcache.paths import RankId
from wcache.protocol.messages import (
    PROTOCOL_VERSION,
    AskLoad,
    AskReport,
    Attach,
    Checked,
    CheckOrder,
    Descriptors,
    Hello,
    LoadFailed,
    Offer,
    Progress,
    Publish,
    Refused,
    Release,
    Renew,
    Reply,
    Request,
    Role,
    Stage,
    StoreAgain,
    Switch,
    Welcome,
)
from wcache.protocol.reports import LeaseReport
from wcache.protocol.wire import close_all

MAX_COMMAND = 160

# Who may say what; everything else said in a role is refused.
_ROLES: dict[type[Request], Role] = {
    Attach: "client",
    Renew: "client",
    Offer: "client",
    AskLoad: "loader",
    Progress: "loader",
    Publish: "loader",
    Checked: "loader",
    LoadFailed: "loader",
    StoreAgain: "operator",
    Stage: "operator",
    Switch: "operator",
    Release: "operator",
}
# Whoever may attach may ask for a report as an operator; these decide what everybody gets.
_COMMANDS = (Stage, Switch, Release)


def handle(
    message: Request,
    peer: Connection,
    rank: Rank,
    rank_id: RankId,
    own_pid: int,
    refusals: Refusals,
) -> None:
    """Answers one message; a refusal that ends the conversation sets ``peer.closing``."""
    if isinstance(message, Descriptors):
        peer.announce(message.count)
        return
    fds = peer.take_fds()
    if fds and not isinstance(message, Publish | Offer):
        close_all(fds)
        _refuse(peer, Refused(reason="bad_request", message="descriptors came for no message"))
    elif isinstance(message, Hello):
        _greet(message, peer, rank, rank_id, own_pid, refusals)
    elif peer.hello is None:
        close_all(fds)
        _refuse(peer, Refused(reason="bad_request", message="the first message must be hello"))
    elif peer.hello.role != _ROLES.get(type(message), peer.hello.role):
        close_all(fds)
        kind = type(message).__name__
        said = f"a {peer.hello.role} can not send {kind}"
        _refuse(peer, Refused(reason="bad_request", message=said))
    elif isinstance(message, _COMMANDS) and not may_command(peer.peer):
        said = f"uid {peer.peer.uid} may not decide what rank {rank_id} serves"
        _refuse(peer, Refused(reason="permission", message=said, hint="use sudo"))
    else:
        _answer(message, peer, rank, fds, refusals)


def _greet(
    message: Hello,
    peer: Connection,
    rank: Rank,
    rank_id: RankId,
    own_pid: int,
    refusals: Refusals,
) -> None:
    if message.version != PROTOCOL_VERSION:
        said = f"protocol {message.version} is not spoken here, {PROTOCOL_VERSION} is"
        hint = "run the same wcache in daemon, loader and engine"
        _refuse(peer, Refused(reason="version", message=said, hint=hint))
    elif peer.hello is not None:
        _refuse(peer, Refused(reason="bad_request", message="hello was said before"))
    elif not may(peer.peer, rank.access, message.role):
        said = f"uid {peer.peer.uid} may not be a {message.role} of rank {rank_id}"
        hint = "see [access] in the configuration: group, uids, publishers"
        refusal = Refused(reason="permission", message=said, hint=hint)
        refusals.attach(_lease(peer, message), refusal)
        _refuse(peer, refusal)
    else:
        peer.hello = message
        peer.queue(Welcome(instance=rank_id.instance, rank=rank_id.rank, pid=own_pid))


def _answer(
    message: Request, peer: Connection, rank: Rank, fds: list[int], refusals: Refusals
) -> None:
    number = peer.number
    reply: Reply | None
    match message:
        case AskReport():
            reply = rank.report()
        case Attach():
            lease = _lease(peer, peer.hello)
            reply, given = rank.attach(number, lease, message)
            if isinstance(reply, Refused):
                refusals.attach(lease, reply)
            peer.queue(reply, given)
            return
        case Renew():
            reply = rank.renew(
                number, _lease(peer, peer.hello), message, trusted=_may_publish(peer, rank)
            )
        case Offer():
            reply = rank.offer(
                _lease(peer, peer.hello), message, fds, trusted=_may_publish(peer, rank)
            )
        case AskLoad():
            reply = rank.ask_load(number, peer.peer.pid, message)
            peer.queue(reply, rank.reclaim.fds if isinstance(reply, CheckOrder) else ())
            return
        case Progress():
            reply = rank.progress(number, message)
        case Publish():
            reply = rank.publish(number, message, fds)
        case Checked():
            reply = rank.checked(number, message)
        case LoadFailed():
            reply = rank.load_failed(number, message)
        case Stage() | Switch() | Release():
            reply = rank.change(message)
        case StoreAgain():
            reply = rank.store_again()
        case _:
            reply = Refused(reason="bad_request", message="not a request")
    if reply is not None:
        peer.queue(reply)


def _lease(peer: Connection, hello: Hello | None) -> LeaseReport:
    """The lease of this peer; the rank fills in the generation."""
    said = hello.command if hello else ""
    # Every lease must fit in one report: what a peer calls itself is cut and made printable.
    command = "".join(c if c.isprintable() else "?" for c in said[:MAX_COMMAND])
    return LeaseReport(
        pid=peer.peer.pid, uid=peer.peer.uid, command=command, generation=0, since=time.time()
    )


def _may_publish(peer: Connection, rank: Rank) -> bool:
    return may(peer.peer, rank.access, "loader")


def _refuse(peer: Connection, refusal: Refused) -> None:
    peer.queue(refusal)
    peer.closing = True
