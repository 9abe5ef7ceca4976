"""The messages on the direct supervisor's control socket; frames are those of ranks."""

from typing import Annotated

import msgspec

from wcache.protocol.messages import Message, Refused, decode_body
from wcache.supervise.interface import UnitReport

MAX_RANKS = 4096

Rank = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000)]
Ranks = Annotated[tuple[Rank, ...], msgspec.Meta(max_length=MAX_RANKS)]


class Show(Message, tag="show", frozen=True, kw_only=True):
    """Answered with :class:`Reports` of the ranks that are known."""


class Start(Message, tag="start", frozen=True, kw_only=True):
    """Answered with :class:`Ok` once the processes exist."""

    ranks: Ranks


class Load(Message, tag="load", frozen=True, kw_only=True):
    """Answered with :class:`Ok` once the loaders run."""

    ranks: Ranks


class Restart(Message, tag="restart", frozen=True, kw_only=True):
    """Answered with :class:`Ok` once the new processes exist."""

    ranks: Ranks


class Stop(Message, tag="stop", frozen=True, kw_only=True):
    """Answered with :class:`Ok` once daemons and loaders have ended."""

    ranks: Ranks


class Shutdown(Message, tag="shutdown", frozen=True, kw_only=True):
    """Stops every rank and then the supervisor; answered with :class:`Ok` in between."""


class Ok(Message, tag="ok", frozen=True, kw_only=True):
    """It is done."""


class Reports(Message, tag="reports", frozen=True, kw_only=True):
    units: tuple[UnitReport, ...]


Request = Show | Start | Load | Restart | Stop | Shutdown
Reply = Reports | Ok | Refused

REQUESTS: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
REPLIES: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def decode_reply(body: bytes) -> Reply:
    """Decodes one frame's content; raises :class:`ProtocolError`."""
    return decode_body(body, REPLIES)
