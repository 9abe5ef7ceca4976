"""What a daemon answers, read also where it is of another wcache that has more to say. Pure."""

from typing import Any

import msgspec

import wcache
from wcache.config import Config
from wcache.errors import ProtocolError
from wcache.protocol.messages import NOT_A_MESSAGE, REPLIES, Refused, Reply, Report, decode_body
from wcache.protocol.reports import GenerationReport


class _AnyGeneration(GenerationReport, frozen=True, kw_only=True):
    config: Any = None
    """A configuration that has a key which is not known here is none of ours."""


class _AnyReport(Report, tag="report", frozen=True, kw_only=True):
    generations: tuple[_AnyGeneration, ...] = ()


class _Said(msgspec.Struct, frozen=True):
    """The part of a refusal or report that every wcache must be able to read."""

    type: str
    version: Any = None
    message: str = ""
    hint: str = ""


def decode_reply(body: bytes) -> Reply:
    """Decodes one frame's content.

    Of a report without what is not known here: a generation's configuration is None where it has
    other keys. A refusal for a reason of a later wcache is ``invalid``, in its own words. Raises
    :class:`ProtocolError` for what is no reply, and with both versions for a report that can not be
    read.
    """
    try:
        return decode_body(body, REPLIES)
    except ProtocolError as error:
        try:
            said = msgspec.json.decode(body, type=_Said)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise error from None
        if said.type == "refused" and said.message:
            return Refused(reason="invalid", message=said.message, hint=said.hint)
        if said.type != "report":
            raise
    try:
        found = msgspec.json.decode(body, type=_AnyReport)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not isinstance(said.version, str) or said.version == wcache.__version__:
            raise ProtocolError(f"{NOT_A_MESSAGE}{str(error)[:200]}") from None
        own = wcache.__version__
        raise ProtocolError(
            f"runs wcache {said.version[:40]}, whose report wcache {own} can not read"
        ) from None
    known = tuple(map(_known, found.generations))
    return Report(**msgspec.structs.asdict(found) | {"generations": known})


def _known(held: _AnyGeneration) -> GenerationReport:
    try:
        config = msgspec.convert(held.config, Config | None)
    except msgspec.ValidationError:
        config = None
    return GenerationReport(**msgspec.structs.asdict(held) | {"config": config})


def is_unknown(refusal: Refused) -> bool:
    """True where the message that was refused is one that the daemon's wcache has not."""
    return refusal.reason == "bad_request" and refusal.message.startswith(NOT_A_MESSAGE)
