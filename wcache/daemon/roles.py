"""Which generation plays which part, and the record of it that outlives the daemon."""

import logging
import re

import msgspec

from wcache.config import AccessSection, Config
from wcache.errors import ProtocolError
from wcache.memory.memfd import create_sealed, read_sealed
from wcache.protocol.wire import close_all

log = logging.getLogger(__name__)

MAX_ROLES_BYTES = 1 << 20
_NAME = re.compile(r"roles\.([1-9][0-9]{0,8})")


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a record that every version of wcache must be able to read."""

    serving: int | None = None
    """Given to whoever attaches."""
    held: int | None = None
    """Served before, and kept so that an operator can go back to it."""


class Roles(Choice, frozen=True, kw_only=True):
    """What numbers alone do not tell; whatever has no part here drains."""

    candidate: Config | None = None
    """What an operator wants made ready beside the served weights. The generation that is so, once
    there is one, is staged."""
    configs: dict[int, Config] = {}
    """The configuration that each generation goes with, as far as it is known."""

    @property
    def choice(self) -> tuple[int | None, int | None, Config | None]:
        """All of it that decides on what is served and what is freed."""
        return self.serving, self.held, self.candidate


def without_access(config: Config) -> Config:
    """What decides on weights; who may attach does not go back with them."""
    return msgspec.structs.replace(config, access=AccessSection())


class Record:
    """The sealed memfd that says the roles, under a name with a rising number.

    A record is stored under a new name before the one before it is taken away, so a crash between
    the two leaves both, of which the higher number counts, and never none.
    """

    def __init__(self, sequence: int, fd: int) -> None:
        self.sequence = sequence
        self.fd = fd

    @property
    def name(self) -> str:
        return f"roles.{self.sequence}"

    @classmethod
    def of(cls, roles: Roles, sequence: int) -> "Record":
        return cls(sequence, create_sealed("wcache-roles", msgspec.json.encode(roles)))

    def read(self) -> Roles:
        """Raises :class:`ProtocolError` for what is no record at all."""
        data = read_sealed(self.fd, MAX_ROLES_BYTES)
        try:
            return msgspec.json.decode(data, type=Roles)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # perhaps of another version: what counts most is tried alone
        try:
            choice = msgspec.json.decode(data, type=Choice)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"record of roles can not be read: {str(error)[:200]}") from None
        return Roles(serving=choice.serving, held=choice.held)

    def close(self) -> None:
        close_all([self.fd])


def take_records(handed_over: dict[str, int]) -> list[Record]:
    """Takes the records out of ``handed_over``, the one that counts last."""
    found = []
    for name in list(handed_over):
        if match := _NAME.fullmatch(name):
            found.append(Record(int(match[1]), handed_over.pop(name)))
    return sorted(found, key=lambda record: record.sequence)
