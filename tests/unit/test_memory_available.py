"""Free memory is what the machine has, or less where a cgroup says so."""

from pathlib import Path

import pytest

from wcache.memory.available import available_bytes, free_hugepage_bytes

pytestmark = pytest.mark.unit

GIB = 1 << 30


class Machine:
    """A /proc and a cgroup mount, as files in a folder."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.cgroups = root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroups.mkdir()
        self.file(self.proc / "meminfo", f"MemTotal: 1 kB\nMemAvailable:  {100 * GIB // 1024} kB\n")

    def file(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def mount(self, filesystem: str, options: str, root: str = "/") -> None:
        line = f"30 1 0:26 {root} {self.cgroups} rw shared:4 - {filesystem} x {options}\n"
        self.file(self.proc / "self/mountinfo", f"1 0 8:1 / / rw - ext4 /dev/x rw\n{line}")

    def member(self, text: str) -> None:
        self.file(self.proc / "self/cgroup", text)

    def v2(self, group: str, limit: str, used: int, cache: int = 0) -> None:
        folder = self.cgroups / group
        self.file(folder / "memory.max", f"{limit}\n")
        self.file(folder / "memory.current", f"{used}\n")
        self.file(folder / "memory.stat", f"anon 5\nactive_file {cache}\ninactive_file 0\n")

    @property
    def available(self) -> int:
        return available_bytes(self.proc)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_cgroups_all_that_is_available_counts(machine: Machine) -> None:
    assert machine.available == 100 * GIB


def test_this_machine_has_an_answer() -> None:
    assert available_bytes() > 0
    assert free_hugepage_bytes() >= 0


def test_the_cgroups_limit_counts_less_what_is_used(machine: Machine) -> None:
    machine.mount("cgroup2", "rw,nsdelegate")
    machine.member("0::/a/b\n")
    machine.v2("a/b", str(10 * GIB), 4 * GIB)
    assert machine.available == 6 * GIB


def test_a_limit_further_up_counts_as_well(machine: Machine) -> None:
    machine.mount("cgroup2", "rw")
    machine.member("0::/a/b\n")
    machine.v2("a/b", "max", 1 * GIB)
    machine.v2("a", str(5 * GIB), 2 * GIB)
    assert machine.available == 3 * GIB


def test_page_cache_is_not_in_the_way(machine: Machine) -> None:
    """Else a checkpoint that was read would take the room of the weights that it holds."""
    machine.mount("cgroup2", "rw")
    machine.member("0::/a\n")
    machine.v2("a", str(10 * GIB), 10 * GIB, cache=7 * GIB)
    assert machine.available == 7 * GIB


def test_a_cgroup_over_its_limit_has_nothing_left(machine: Machine) -> None:
    machine.mount("cgroup2", "rw")
    machine.member("0::/a\n")
    machine.v2("a", str(1 * GIB), 2 * GIB)
    assert machine.available == 0


@pytest.mark.parametrize("limit", ["max", "", "what"])
def test_a_limit_that_says_nothing_is_no_bound(machine: Machine, limit: str) -> None:
    machine.mount("cgroup2", "rw")
    machine.member("0::/a\n")
    machine.v2("a", limit, 2 * GIB)
    assert machine.available == 100 * GIB


def test_a_container_that_mounts_its_own_cgroup_is_bounded_by_it(machine: Machine) -> None:
    machine.mount("cgroup2", "rw", root="/docker/1")
    machine.member("0::/docker/1/inner\n")
    machine.v2("inner", str(3 * GIB), 1 * GIB)
    assert machine.available == 2 * GIB


def test_a_mount_of_somewhere_else_bounds_by_its_root(machine: Machine) -> None:
    machine.mount("cgroup2", "rw", root="/docker/1")
    machine.member("0::/elsewhere\n")
    machine.v2(".", str(3 * GIB), 1 * GIB)
    assert machine.available == 2 * GIB


def test_version_1_is_read_as_well(machine: Machine) -> None:
    machine.mount("cgroup", "rw,memory")
    machine.member("5:cpu,cpuacct:/\n4:memory:/a\n0::/other\n")
    folder = machine.cgroups / "a"
    machine.file(folder / "memory.limit_in_bytes", f"{8 * GIB}\n")
    machine.file(folder / "memory.usage_in_bytes", f"{7 * GIB}\n")
    machine.file(folder / "memory.stat", f"cache 1\ntotal_inactive_file {2 * GIB}\n")
    assert machine.available == 3 * GIB


def test_another_controller_of_version_1_is_not_asked(machine: Machine) -> None:
    machine.mount("cgroup", "rw,cpu")
    machine.member("4:memory:/a\n")
    machine.file(machine.cgroups / "a/memory.limit_in_bytes", "1\n")
    machine.file(machine.cgroups / "a/memory.usage_in_bytes", "1\n")
    assert machine.available == 100 * GIB


def test_promised_hugepages_are_not_free(tmp_path: Path) -> None:
    (tmp_path / "free_hugepages").write_text("10\n")
    (tmp_path / "resv_hugepages").write_text("4\n")
    assert free_hugepage_bytes(tmp_path) == 6 * (2 << 20)
    assert free_hugepage_bytes(tmp_path / "absent") == 0
