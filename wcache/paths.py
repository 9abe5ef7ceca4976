"""Where things lie: sockets, ready files, configuration and logs of an instance and its ranks."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from wcache.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")

DEFAULT_FILE_NAME = "wcache"
"""What the default instance's files are called."""

# sun_path is 108 bytes with its terminator (unix(7)).
MAX_SOCKET_PATH = 107


@dataclass(frozen=True, order=True, slots=True)
class RankId:
    """A rank of an instance, as in ``wcache@3.service`` or ``wcache@draft:3.service``."""

    instance: str
    """Empty for the default instance."""
    rank: int

    def __str__(self) -> str:
        return f"{self.instance}:{self.rank}" if self.instance else str(self.rank)

    @classmethod
    def parse(cls, text: str) -> "RankId":
        """Reads ``3`` or ``NAME:3``; raises :class:`UsageError` for anything else."""
        name, colon, number = text.rpartition(":")
        # Rank 03 would be another file name for the same rank, so only one spelling is taken.
        if not number.isascii() or not number.isdigit() or str(int(number[:6])) != number:
            raise UsageError(f"not a rank: {text!r}", hint="a rank is written 3 or NAME:3")
        if colon:
            check_instance_name(name)
        return cls(name, int(number))


def check_instance_name(name: str) -> str:
    """Returns ``name``, or raises :class:`UsageError` when it can not be part of a file name."""
    if name == DEFAULT_FILE_NAME:
        raise UsageError(
            f"an instance can not be named {name!r}: the default one's files are",
            hint="leave --instance out for the default instance",
        )
    if not name:
        raise UsageError(
            "not an instance name: ''",
            hint="without a name the default instance is meant: leave it out",
        )
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"not an instance name: {name!r}",
            hint="at most 32 letters, digits, '.', '_' and '-', beginning with a letter or digit",
        )
    return name


def rank_meant(rank: int | None, instance: str | None) -> RankId:
    """What a program means that leaves either out: WCACHE_RANK and WCACHE_INSTANCE, which
    ``wcache run`` sets, then rank 0 of the default instance.

    Raises :class:`UsageError` for what is no rank or no name.
    """
    if rank is None:
        text = os.environ.get("WCACHE_RANK", "0")
        try:
            rank = int(text)
        except ValueError:
            raise UsageError(f"WCACHE_RANK is not a number: {text!r}") from None
    if rank < 0:
        raise UsageError(f"not a rank: {rank}")
    if instance is None:
        instance = os.environ.get("WCACHE_INSTANCE", "")
    return RankId(check_instance_name(instance) if instance else "", rank)


def _folder(variable: str, system: str, user_variable: str, user_default: str) -> Path:
    if chosen := os.environ.get(variable):
        return Path(chosen)
    if os.geteuid() == 0:
        return Path(system)
    return Path(os.environ.get(user_variable) or Path.home() / user_default) / "wcache"


def run_folder() -> Path:
    """Sockets and ready files: ``/run/wcache``, or the user's; ``WCACHE_RUN_DIR`` overrides."""
    fallback = f"/tmp/wcache-{os.geteuid()}"
    return _folder("WCACHE_RUN_DIR", "/run/wcache", "XDG_RUNTIME_DIR", fallback)


def config_folder() -> Path:
    """TOML files: ``/etc/wcache``, or the user's; ``WCACHE_CONFIG_DIR`` overrides."""
    return _folder("WCACHE_CONFIG_DIR", "/etc/wcache", "XDG_CONFIG_HOME", ".config")


def state_folder() -> Path:
    """Logs, and what was found out of checkpoints: ``/var/lib/wcache``; ``WCACHE_STATE_DIR``
    overrides."""
    return _folder("WCACHE_STATE_DIR", "/var/lib/wcache", "XDG_STATE_HOME", ".local/state")


@dataclass(frozen=True, slots=True)
class InstancePaths:
    """The files of one instance."""

    instance: str
    run: Path
    config: Path
    state: Path

    @classmethod
    def of(cls, instance: str) -> "InstancePaths":
        return cls(instance, run_folder(), config_folder(), state_folder())

    @property
    def config_file(self) -> Path:
        return self.config / f"{self.instance or DEFAULT_FILE_NAME}.toml"

    @property
    def previous_file(self) -> Path:
        """The configuration of what was served before the last switch.

        No instance's own file can be called so: those end in ``.toml``.
        """
        return self.config / f"{self.instance or DEFAULT_FILE_NAME}.toml.previous"

    @property
    def lock_file(self) -> Path:
        """Held by a command that changes the instance."""
        return self.run / f"{self.instance or DEFAULT_FILE_NAME}.lock"

    @property
    def identity_folder(self) -> Path:
        """For :class:`wcache.checkpoint.IdentityCache`, shared by all instances."""
        return self.state / "identity"

    @property
    def architecture_folder(self) -> Path:
        """For :class:`wcache.load.architectures.Architectures`, shared by all instances."""
        return self.state / "architecture"

    @property
    def supervisor_folder(self) -> Path:
        return self.run / (f"{self.instance}:supervisor" if self.instance else "supervisor")

    @property
    def supervisor_socket(self) -> Path:
        return self.supervisor_folder / "control.sock"

    @property
    def supervisor_log(self) -> Path:
        return self.state / "log" / f"{self.instance or DEFAULT_FILE_NAME}.supervisor.log"

    @property
    def runs_folder(self) -> Path:
        """Records of ``wcache run``."""
        return self.state / "runs" / (self.instance or DEFAULT_FILE_NAME)

    def rank(self, rank: int) -> "RankPaths":
        return RankPaths(RankId(self.instance, rank), self.run / str(RankId(self.instance, rank)))

    def log_file(self, rank: int, part: str) -> Path:
        """``part`` is ``daemon`` or ``loader``."""
        return self.state / "log" / f"{self.instance or DEFAULT_FILE_NAME}.{rank}.{part}.log"


@dataclass(frozen=True, slots=True)
class RankPaths:
    """The files of one rank, in a folder of its own, which is all that a container must share."""

    id: RankId
    folder: Path

    @classmethod
    def of(cls, rank_id: RankId) -> "RankPaths":
        return InstancePaths.of(rank_id.instance).rank(rank_id.rank)

    @property
    def socket(self) -> Path:
        return self.folder / "control.sock"

    @property
    def ready_file(self) -> Path:
        return self.folder / "rank.ready"

    @property
    def fingerprint_file(self) -> Path:
        return self.folder / "fingerprint.json"

    @property
    def served_file(self) -> Path:
        """What was served last; stays when the daemon ends (:mod:`wcache.served`)."""
        return self.folder / "served.json"


def check_socket_path(path: Path) -> Path:
    """Returns ``path``, or raises :class:`UsageError` when the kernel could not bind it."""
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        raise UsageError(
            f"socket path has {length} bytes, the kernel takes {MAX_SOCKET_PATH}: {path}",
            hint="set WCACHE_RUN_DIR to a shorter folder",
        )
    return path
