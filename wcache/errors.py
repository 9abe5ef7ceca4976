"""Errors that an operator can mend: one line, a hint, and the exit code that says which kind."""

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wcache.difference import Difference


class ExitCode(IntEnum):
    """What a command's exit status says; 75 and up are those of sysexits.h."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_READY = 3
    NO_SUCH_RANK = 4
    MISMATCH = 5
    TRY_AGAIN = 75
    NO_PERMISSION = 77
    CONFIGURATION = 78


class WcacheError(Exception):
    """A failure that is not a bug.

    ``message`` is one line, lower case, without a full stop; ``hint`` says what to do about it.
    Anything that is not a ``WcacheError`` reaches the operator as a traceback.
    """

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, message: str, *, hint: str = "", exit_code: ExitCode | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if exit_code is not None:
            self.exit_code = exit_code


class UsageError(WcacheError):
    """Arguments that do not fit together."""

    exit_code = ExitCode.USAGE


class ConfigError(WcacheError):
    """A configuration that can not be used; ``problems`` has one line for each fault in it."""

    exit_code = ExitCode.CONFIGURATION

    def __init__(
        self,
        message: str,
        *,
        problems: tuple[str, ...] = (),
        hint: str = "",
        exit_code: ExitCode | None = None,
    ) -> None:
        super().__init__(message, hint=hint, exit_code=exit_code)
        self.problems = problems


class CheckpointError(WcacheError):
    """A checkpoint that is absent, damaged, or can not be sharded as asked."""

    exit_code = ExitCode.CONFIGURATION


class UnsupportedQuantForIPCError(CheckpointError):
    """Weights of a quantization method whose whole effect does not cross a map (wcache.gate)."""

    def __init__(self, message: str, *, method: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.method = method


class OutOfMemoryError(WcacheError):
    """Memory that is not there, found before anything was loaded."""


class NotReadyError(WcacheError):
    """The rank is known, but has no weights to give yet."""

    exit_code = ExitCode.NOT_READY


class NoSuchRankError(WcacheError):
    """No such rank in the configuration, or no daemon where nobody looked for one there."""

    exit_code = ExitCode.NO_SUCH_RANK


class MismatchError(WcacheError):
    """Weights that are not the wanted ones, or not the bytes that were published.

    ``differences`` has every field in which two fingerprints differ, also those that the message
    has no room for.
    """

    exit_code = ExitCode.MISMATCH

    def __init__(
        self, message: str, *, differences: "Sequence[Difference]" = (), hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.differences = tuple(differences)


class TryAgainError(WcacheError):
    """Somebody else is at work; the same call may succeed later."""

    exit_code = ExitCode.TRY_AGAIN


class NoPermissionError(WcacheError):
    """The caller may not do this."""

    exit_code = ExitCode.NO_PERMISSION


class ProtocolError(WcacheError):
    """A peer that does not keep to the protocol."""


class ManifestError(WcacheError):
    """A manifest that does not describe memory that could exist."""

    exit_code = ExitCode.MISMATCH
