"""How much memory this process could still take from the host."""

from dataclasses import dataclass
from pathlib import Path

HUGEPAGE_BYTES = 2 << 20
_PROC = Path("/proc")
_HUGEPAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


@dataclass(frozen=True, slots=True)
class _Group:
    """The files that a memory cgroup says its limit, its use and its page cache in."""

    limit: str
    usage: str
    statistics: str = "memory.stat"
    cache_keys: tuple[str, ...] = ("active_file", "inactive_file")


_V2 = _Group(limit="memory.max", usage="memory.current")
_V1 = _Group(
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    cache_keys=("total_active_file", "total_inactive_file"),
)


def available_bytes(proc: Path = _PROC) -> int:
    """MemAvailable, or less where a memory cgroup around this process allows less.

    Every cgroup from the process's own up to the root of its mount bounds it. A limit that can
    not be read, or is not set, is no bound.
    """
    bounds = [_meminfo(proc, "MemAvailable")]
    for kind, folder, root in _cgroups(proc):
        while True:
            room = _room(kind, folder)
            if room is not None:
                bounds.append(room)
            if folder == root or folder == folder.parent:
                break
            folder = folder.parent
    return max(0, min(bounds))


def free_hugepage_bytes(folder: Path = _HUGEPAGES) -> int:
    """Bytes in 2 MiB pages that are free and not promised to another mapping."""
    free = _number(folder / "free_hugepages") or 0
    promised = _number(folder / "resv_hugepages") or 0
    return max(0, free - promised) * HUGEPAGE_BYTES


def _meminfo(proc: Path, key: str) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"{proc}/meminfo has no {key}")


def _cgroups(proc: Path) -> list[tuple[_Group, Path, Path]]:
    """This process's memory cgroups: (version, its folder, the mount that it is in).

    A container sees its cgroup's path from the host, but mounts only that cgroup; mountinfo's
    fourth field is the part of the path that the mount stands for. See cgroups(7).
    """
    paths: dict[str, Path] = {}
    for line in _text(proc / "self/cgroup").splitlines():
        number, controllers, name = line.split(":", 2)
        if number == "0" and not controllers:
            paths["cgroup2"] = Path(name)
        elif "memory" in controllers.split(","):
            paths["cgroup"] = Path(name)
    found: list[tuple[_Group, Path, Path]] = []
    for line in _text(proc / "self/mountinfo").splitlines():
        mount, _, rest = line.partition(" - ")
        filesystem, _, options = rest.partition(" ")
        if filesystem not in paths:
            continue
        if filesystem == "cgroup" and "memory" not in options.split()[-1].split(","):
            continue
        root, point = mount.split()[3:5]
        path = paths[filesystem]
        below = path.relative_to(root) if path.is_relative_to(root) else Path()
        kind = _V2 if filesystem == "cgroup2" else _V1
        found.append((kind, Path(point) / below, Path(point)))
    return found


def _room(kind: _Group, folder: Path) -> int | None:
    """What a cgroup would still grant: page cache counts as used, but is given back on demand."""
    limit = _number(folder / kind.limit)
    usage = _number(folder / kind.usage)
    if limit is None or usage is None:
        return None
    cache = 0
    for line in _text(folder / kind.statistics).splitlines():
        key, _, value = line.partition(" ")
        if key in kind.cache_keys and value.isdigit():
            cache += int(value)
    return max(0, limit - usage + min(cache, usage))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
