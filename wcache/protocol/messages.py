"""The messages on a rank's control socket, and how they become bytes. Pure.

A frame is a 4-byte big-endian length and that many bytes of JSON. A peer says :class:`Hello` first
and is answered with :class:`Welcome`. File descriptors travel on :class:`Descriptors` frames, at
most :data:`MAX_FDS_PER_FRAME` each, in front of the message that uses them.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, TypeVar

import msgspec

from wcache.config import Config
from wcache.difference import Difference
from wcache.errors import ProtocolError
from wcache.fingerprint import Fingerprint
from wcache.manifest import SlabInfo
from wcache.protocol.reports import (
    FreedReport,
    GenerationReport,
    GenerationRole,
    LeaseReport,
    ProgressReport,
)
from wcache.state import RankState

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 1 << 20
LENGTH_BYTES = 4
# The kernel takes 253 descriptors a message (SCM_MAX_FD).
MAX_FDS_PER_FRAME = 240
# 4,095 slabs of 1 GiB and the manifest.
MAX_FDS_PER_TRANSFER = 4096
MAX_TEXT = 4096
NOT_A_MESSAGE = "not a message: "
"""How the refusal of what can not be decoded begins, in every version."""

LoadSource = Literal["checkpoint", "engine"]
Role = Literal["client", "loader", "operator"]
StageStep = Literal[
    "serving",  # the weights are the ones that are served
    "staged",  # a generation that is held has them
    "loading",  # a loader is at work on them
    "load",  # a loader that asks now is ordered to load them
]
RefusalReason = Literal[
    "bad_request",  # not understood, or not at this point of the conversation
    "version",  # a protocol that this daemon does not speak
    "permission",  # the peer's user may not do this
    "not_ready",  # no weights yet
    "mismatch",  # weights of another model, layout or dtype
    "gone",  # the generation is not held any more
    "busy",  # another loader is at work
    "invalid",  # what was offered did not pass the checks
]


Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """A frame's content. Unknown fields are passed over, so that a field can be added."""


# --- said by a peer ---------------------------------------------------------------------------


class Hello(Message, tag="hello", frozen=True, kw_only=True):
    """Opens a conversation."""

    version: int = PROTOCOL_VERSION
    role: Role
    command: str
    """What ``status`` shows for this peer."""


class Attach(Message, tag="attach", frozen=True, kw_only=True):
    """Asks for the served generation; answered with descriptors and :class:`Attached`."""

    wanted: Fingerprint | None = None


class Renew(Message, tag="renew", frozen=True, kw_only=True):
    """Takes up the lease again after a daemon's restart.

    Answered with :class:`Leased`, or with :class:`OfferWanted` by a daemon that has lost the
    generation, where ``can_offer`` says that the client has kept its descriptors.
    """

    manifest_digest: str
    can_offer: bool = False


class Offer(Message, tag="offer", frozen=True, kw_only=True):
    """A client gives back what it has mapped: 1 + len(slabs) descriptors, the manifest's first.

    Answered with :class:`Offered`; the lease comes with a later :class:`Renew`, once a loader has
    found the bytes to be the right ones.
    """

    slabs: tuple[SlabInfo, ...]


class AskReport(Message, tag="ask_report", frozen=True, kw_only=True):
    """Answered with :class:`Report`."""


class AskLoad(Message, tag="ask_load", frozen=True, kw_only=True):
    """A loader asks what is wanted.

    Answered with :class:`LoadOrder`, :class:`NothingToLoad`, :class:`CheckOrder` or
    :class:`AskAgain`.
    """

    source: LoadSource = "checkpoint"
    """``engine`` is somebody who has the weights already, as ``wcache.publish`` does."""
    repair: bool = False
    """The weights that are served are the wanted ones, and some of their bytes are damaged: they
    are to be published again."""


class Stage(Message, tag="stage", frozen=True, kw_only=True):
    """An operator wants other weights ready beside the served ones: :class:`Staged`."""

    config: Config
    load: bool = True
    """Have a loader load them when no generation has them; else that is refused with ``gone``."""


class Switch(Message, tag="switch", frozen=True, kw_only=True):
    """Serves the staged generation in place of the old one, which drains: :class:`Switched`."""

    generation: int
    keep_old: bool = False
    """Hold the old one, leased or not, so that it can be gone back to."""


class Release(Message, tag="release", frozen=True, kw_only=True):
    """Gives up generations by their role: :class:`Released`.

    ``staged`` forgets a candidate that is not loaded yet as well. ``serving`` leaves the rank
    empty, and is refused with ``busy`` while anything is leased.
    """

    roles: tuple[GenerationRole, ...]


class Progress(Message, tag="progress", frozen=True, kw_only=True):
    """How far a loader is. Not answered."""

    phase: str
    """One word: ``plan``, ``read``, ``digest``, ``publish``."""
    done_bytes: Bytes
    total_bytes: Bytes


class Publish(Message, tag="publish", frozen=True, kw_only=True):
    """A loader hands over 1 + len(slabs) descriptors, the manifest's first.

    Answered with :class:`Published`.
    """

    slabs: tuple[SlabInfo, ...]


class Checked(Message, tag="checked", frozen=True, kw_only=True):
    """What a loader found of the bytes of a :class:`CheckOrder`.

    Answered with :class:`Published` when they are served now, else with :class:`AskAgain`.
    """

    problem: str = ""
    """Why they are not those that were published; empty when they are."""


class LoadFailed(Message, tag="load_failed", frozen=True, kw_only=True):
    """A loader gives up. Not answered."""

    message: str
    hint: str = ""


class StoreAgain(Message, tag="store_again", frozen=True, kw_only=True):
    """A supervisor that took this daemon over asks for its descriptors: :class:`Stored`."""


# --- said by both -----------------------------------------------------------------------------


class Descriptors(Message, tag="descriptors", frozen=True, kw_only=True):
    """Carries ``count`` file descriptors for the next message. Not answered."""

    count: int


# --- said by the daemon -----------------------------------------------------------------------


class Welcome(Message, tag="welcome", frozen=True, kw_only=True):
    version: int = PROTOCOL_VERSION
    instance: str
    rank: int
    pid: int


class Refused(Message, tag="refused", frozen=True, kw_only=True):
    """The answer to any request that is not met."""

    reason: RefusalReason
    message: str
    hint: str = ""
    differences: tuple[Difference, ...] = ()


class Attached(Message, tag="attached", frozen=True, kw_only=True):
    """Follows 1 + len(slabs) descriptors, the manifest's first. The connection is the lease."""

    generation: int
    manifest_digest: str
    slabs: tuple[SlabInfo, ...]


class Leased(Message, tag="leased", frozen=True, kw_only=True):
    generation: int


class OfferWanted(Message, tag="offer_wanted", frozen=True, kw_only=True):
    """The daemon is empty and would take the generation back: see :class:`Offer`."""


class Offered(Message, tag="offered", frozen=True, kw_only=True):
    """What was offered is going to be checked."""


class LoadOrder(Message, tag="load_order", frozen=True, kw_only=True):
    """What a loader is to load; it alone may publish until it is done or gone."""

    generation: int
    config: Config


class CheckOrder(Message, tag="check_order", frozen=True, kw_only=True):
    """Follows the descriptors of an :class:`Offer`: the loader is to compare bytes with digests.

    Answered with :class:`Checked`.
    """

    generation: int
    manifest_digest: str
    slabs: tuple[SlabInfo, ...]


class AskAgain(Message, tag="ask_again", frozen=True, kw_only=True):
    """It is not settled yet what is wanted: ask for a load again in ``after_s``."""

    after_s: float


class NothingToLoad(Message, tag="nothing_to_load", frozen=True, kw_only=True):
    message: str


class Staged(Message, tag="staged", frozen=True, kw_only=True):
    """Where the wanted weights are, and the generation that they are or will be."""

    generation: int
    step: StageStep


class Switched(Message, tag="switched", frozen=True, kw_only=True):
    generation: int


class Released(Message, tag="released", frozen=True, kw_only=True):
    """What was given up; memory that engines have mapped is free when they end."""

    generations: tuple[int, ...] = ()
    slab_bytes: int = 0


class Published(Message, tag="published", frozen=True, kw_only=True):
    generation: int


class Stored(Message, tag="stored", frozen=True, kw_only=True):
    """Every descriptor was handed to the notify socket again."""

    count: int


class Report(Message, tag="report", frozen=True, kw_only=True):
    """All that a daemon can say of itself."""

    instance: str
    rank: int
    pid: int
    version: str
    state: RankState
    status: str
    """The sentence that the supervisor was told."""
    problems: tuple[str, ...] = ()
    """What is wrong while the daemon goes on serving."""
    since: float
    """Unix time of the daemon's start."""
    wanted: Fingerprint | None = None
    """What the configuration asks for; None while it can not be read."""
    differences: tuple[Difference, ...] = ()
    """In what the served generation is not the wanted one."""
    expected_fds: int = 0
    """Descriptors that the supervisor's store should hold for this rank."""
    generations: tuple[GenerationReport, ...] = ()
    leases: tuple[LeaseReport, ...] = ()
    renewing: tuple[int, ...] = ()
    """Pids of engines that held leases on the daemon before this one, live, and may renew them yet;
    0 for one that can not be seen."""
    progress: ProgressReport | None = None
    reclaiming: bool = False
    """Nothing is held, and an engine may give back or has given back what was."""
    staging: Fingerprint | None = None
    """What an operator wants ready beside the served generation."""
    freed: FreedReport | None = None

    @property
    def serving(self) -> GenerationReport | None:
        return next((held for held in self.generations if held.serving), None)

    @property
    def staged(self) -> GenerationReport | None:
        return next((held for held in self.generations if held.role == "staged"), None)


Request = (
    Hello
    | Attach
    | Renew
    | Offer
    | AskReport
    | AskLoad
    | Stage
    | Switch
    | Release
    | Progress
    | Publish
    | Checked
    | LoadFailed
    | StoreAgain
    | Descriptors
)
Reply = (
    Welcome
    | Refused
    | Attached
    | Leased
    | OfferWanted
    | Offered
    | LoadOrder
    | CheckOrder
    | AskAgain
    | NothingToLoad
    | Staged
    | Switched
    | Released
    | Published
    | Stored
    | Report
    | Descriptors
)

REQUESTS: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
REPLIES: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)

M = TypeVar("M")


def encode_frame(message: msgspec.Struct) -> bytes:
    """Raises :class:`ProtocolError` when the message does not fit in a frame."""
    body = msgspec.json.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"message of {len(body)} bytes does not fit in a frame")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def decode_body(body: bytes, decoder: msgspec.json.Decoder[M]) -> M:
    """Decodes one frame's content; raises :class:`ProtocolError`."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{NOT_A_MESSAGE}{str(error)[:200]}") from None


class FrameReader:
    """Cuts a stream of bytes into frames; a length is checked before it is believed."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def is_empty(self) -> bool:
        """True between frames: an end of the stream here loses nothing."""
        return not self._buffer

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the content of each frame that ``data`` completes.

        Raises :class:`ProtocolError` for a length over :data:`MAX_FRAME_BYTES` or of zero.
        """
        self._buffer += data
        while len(self._buffer) >= LENGTH_BYTES:
            length = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
            if not 0 < length <= MAX_FRAME_BYTES:
                raise ProtocolError(f"frame of {length} bytes, at most {MAX_FRAME_BYTES} are taken")
            end = LENGTH_BYTES + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[LENGTH_BYTES:end])
            del self._buffer[:end]
            yield body
