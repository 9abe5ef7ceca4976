"""Puts the shipped systemd files in their places and takes them away again."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from wcache.config import write_file
from wcache.errors import NoPermissionError, WcacheError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

PLACEHOLDER = b"@PYTHON@"
_MAX_BYTES = 1 << 20
_UNIT_SUFFIXES = (".service", ".target")

# ``wcache@.service.preserve.conf`` is put into ``wcache@.service.d/preserve.conf``.
_DROP_IN = re.compile(r"(?P<unit>.+\.service)\.(?P<part>[^.]+\.conf)")
# Drop-ins for newer versions of systemd alone: an older one would complain at every reload.
_SINCE = {"preserve.conf": 254}

# Says which bytes were written, so that a file of an older wcache is told from one that somebody
# has edited, without a record elsewhere that could be lost or be wrong.
_MARK = re.compile(rb"# wcache install: sha256:([0-9a-f]{64})\n")
# A word of ExecStart= that needs neither quotes nor escapes; see systemd.service(5).
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_./+=,~:-]+")

# What ends a unit's start in a user manager, which has no privileges to do it with: exit 216 for
# the first three, 218 for all that takes a capability away or gives one (measured with systemd
# 252). The rest of the sandbox is applied, or passed over where it needs a mount namespace.
_SYSTEM_ONLY = frozenset(
    {
        b"User", b"Group", b"SupplementaryGroups", b"CapabilityBoundingSet",
        b"AmbientCapabilities", b"PrivateDevices", b"ProtectClock", b"ProtectKernelLogs",
        b"ProtectKernelModules",
    }
)  # fmt: skip
_SYSTEM_TARGET, _USER_TARGET = b"multi-user.target", b"default.target"

Action = Literal["wrote", "unchanged", "would write", "removed", "would remove", "kept"]
State = Literal["absent", "current", "outdated", "edited"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What was done with one file."""

    action: Action
    """``kept``: it is not as it was installed, so it is the operator's."""
    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The folders of one manager that files are put into."""

    units: Path
    sysusers: Path | None
    """None for a user manager, as is ``tmpfiles``: it has neither users nor /run to make."""
    tmpfiles: Path | None

    @classmethod
    def system(cls, root: Path = Path("/")) -> "Target":
        """Below /usr/local/lib, which all three tools read after /etc and before /usr/lib.

        /etc is the operator's: ``systemctl mask`` refuses where a unit file lies there, and what
        ``systemctl edit`` puts there ``systemctl revert`` takes away (systemd.unit(5)).
        """
        lib = root / "usr/local/lib"
        return cls(
            units=lib / "systemd/system", sysusers=lib / "sysusers.d", tmpfiles=lib / "tmpfiles.d"
        )

    @classmethod
    def user(cls, config_home: Path, root: Path = Path("/")) -> "Target":
        """``config_home`` is ``$XDG_CONFIG_HOME``, an absolute path."""
        units = root / config_home.relative_to("/") / "systemd/user"
        return cls(units=units, sysusers=None, tmpfiles=None)

    @property
    def is_user(self) -> bool:
        return self.sysusers is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A file as it is to be."""

    path: Path
    data: bytes

    def state(self) -> State:
        found = read_installed(self.path)
        if found is None:
            return "absent"
        if found == self.data:
            return "current"
        return "outdated" if is_ours(found) else "edited"


def shipped_folder() -> "Traversable":
    """The folder ``systemd`` of the wheel, or that of the checkout wcache is run from."""
    # Costs more to import than all the rest of this module, which every command's start pays for.
    from importlib import resources

    package = resources.files("wcache")
    packaged = package / "systemd"
    return packaged if packaged.is_dir() else Path(str(package)).parent / "systemd"


def plan(
    target: Target, *, python: str, systemd_version: int, shipped: "Traversable | None" = None
) -> list[Planned]:
    """Every file that belongs to ``target``, by path.

    ``systemd_version`` of 0 stands for one that is not known: nothing is assumed of it. Raises
    :class:`WcacheError` when ``python`` can not stand in a unit.
    """
    if not _PLAIN_PATH.fullmatch(python):
        raise WcacheError(
            f"a unit can not name this interpreter: {python!r}",
            hint="run wcache from a virtual environment whose path has no spaces or quotes",
        )
    planned = []
    for path, text in _files(shipped or shipped_folder(), target, systemd_version):
        body = text.replace(PLACEHOLDER, python.encode())
        if target.is_user:
            body = _for_user_manager(body)
        planned.append(Planned(path=path, data=_marked(body)))
    return sorted(planned, key=lambda one: one.path)


def install(target: Target, planned: list[Planned], *, dry_run: bool) -> Iterator[Change]:
    """Writes what is not there as planned and removes what an older wcache wrote elsewhere.

    Yields each change once it is made. Raises :class:`NoPermissionError`, :class:`WcacheError`.
    """
    for one in planned:
        state = one.state()
        if state in ("absent", "outdated") and not dry_run:
            _write(one)
        yield Change(action=_INSTALLED[state, dry_run], path=one.path)
    wanted = {one.path for one in planned}
    for path in installed(target):
        if path not in wanted:
            yield _remove(path, dry_run=dry_run)


def uninstall(target: Target, planned: list[Planned], *, dry_run: bool) -> Iterator[Change]:
    """Removes what :func:`install` wrote, of this wcache or another; yields each change."""
    for path in sorted({*installed(target), *(one.path for one in planned)}):
        data = read_installed(path)
        if data is None:
            continue
        yield _remove(path, dry_run=dry_run) if is_ours(data) else Change(action="kept", path=path)


def installed(target: Target) -> list[Path]:
    """Files of the target's folders that are as an install has left them."""
    found = [*target.units.glob("wcache*"), *target.units.glob("wcache*.d/*.conf")]
    for folder in (target.sysusers, target.tmpfiles):
        found += folder.glob("wcache*.conf") if folder else ()
    return sorted(path for path in found if is_ours(read_installed(path) or b""))


def is_ours(data: bytes) -> bool:
    """True when ``data`` was written by :func:`install`, and by nobody since."""
    mark = _MARK.match(data)
    return mark is not None and mark[1].decode() == _digest(data[mark.end() :])


def read_installed(path: Path) -> bytes | None:
    """The content of a file; nothing for a link, which is how a unit is masked; None if absent."""
    try:
        if path.is_symlink():
            return b""
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return file.read(_MAX_BYTES)
    except OSError as error:
        raise _failed("read", path, error) from None


def version_below(root: Path) -> int:
    """The version of the systemd that lies below ``root``; 0 where there is none.

    Nothing of an image can be run to ask it, but its library carries the number in its name.
    """
    numbers = [
        int(match[1])
        for pattern in ("usr/lib/systemd", "usr/lib64/systemd", "lib/systemd", "usr/lib/*/systemd")
        for path in root.glob(f"{pattern}/libsystemd-shared-*.so")
        if (match := re.match(r"libsystemd-shared-(\d{3,4})", path.name))
    ]
    return max(numbers, default=0)


_INSTALLED: dict[tuple[State, bool], Action] = {
    ("absent", False): "wrote",
    ("outdated", False): "wrote",
    ("absent", True): "would write",
    ("outdated", True): "would write",
    ("current", False): "unchanged",
    ("current", True): "unchanged",
    ("edited", False): "kept",
    ("edited", True): "kept",
}


def _files(
    folder: "Traversable", target: Target, systemd_version: int
) -> Iterator[tuple[Path, bytes]]:
    for entry in folder.iterdir():
        name = entry.name
        if name.endswith(_UNIT_SUFFIXES):
            yield target.units / name, entry.read_bytes()
        elif match := _DROP_IN.fullmatch(name):
            if _SINCE.get(match["part"], 0) <= systemd_version:
                yield target.units / f"{match['unit']}.d" / match["part"], entry.read_bytes()
        elif name.endswith(".sysusers.conf") and target.sysusers:
            yield target.sysusers / name.replace(".sysusers", ""), entry.read_bytes()
        elif name.endswith(".tmpfiles.conf") and target.tmpfiles:
            yield target.tmpfiles / name.replace(".tmpfiles", ""), entry.read_bytes()


def _for_user_manager(text: bytes) -> bytes:
    lines: list[bytes] = []
    dropping = continues = False
    for line in text.splitlines(keepends=True):
        if not continues:
            key = line.partition(b"=")[0].strip()
            dropping = key in _SYSTEM_ONLY
            if key in (b"WantedBy", b"RequiredBy"):
                line = line.replace(_SYSTEM_TARGET, _USER_TARGET)
        continues = line.rstrip(b"\n").endswith(b"\\")
        if not dropping:
            lines.append(line)
    return b"".join(lines)


def _marked(body: bytes) -> bytes:
    return b"# wcache install: sha256:" + _digest(body).encode() + b"\n" + body


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _write(one: Planned) -> None:
    try:
        write_file(one.path, one.data, mode=0o644)
    except OSError as error:
        raise _failed("written", one.path, error) from None


def _remove(path: Path, *, dry_run: bool) -> Change:
    if dry_run:
        return Change(action="would remove", path=path)
    try:
        path.unlink()
        if path.parent.name.endswith(".service.d") and not any(path.parent.iterdir()):
            path.parent.rmdir()
    except OSError as error:
        raise _failed("removed", path, error) from None
    return Change(action="removed", path=path)


def _failed(what: str, path: Path, error: OSError) -> WcacheError:
    if isinstance(error, PermissionError):
        return NoPermissionError(
            f"no permission: {path} can not be {what}",
            hint="use sudo, or --user for the units of your own manager",
        )
    reason = (error.strerror or str(error)).lower()
    return WcacheError(f"{path} can not be {what}: {reason}")
