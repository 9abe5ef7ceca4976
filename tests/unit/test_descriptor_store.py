"""The descriptors that are kept for one rank: bounded, closed exactly once."""

import os

import pytest

from wcache.supervise.direct.store import MAX_NAMES_BYTES, DescriptorStore

pytestmark = pytest.mark.unit


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def memfd() -> int:
    return os.memfd_create("test")


def test_descriptors_are_listed_by_number_as_the_handing_over_needs_them() -> None:
    store = DescriptorStore()
    fds = [memfd() for _ in range(4)]
    for fd in reversed(fds):
        assert store.add(f"slab.{fd}", fd) == ""
    assert store.in_order() == [(fd, f"slab.{fd}") for fd in sorted(fds)]
    assert store.clear() == 4
    assert not any(map(is_open, fds))
    assert len(store) == 0


def test_what_is_over_the_limit_is_closed_and_the_rest_stays() -> None:
    store = DescriptorStore(limit=2)
    kept, over = [memfd(), memfd()], memfd()
    for fd in kept:
        assert store.add("slab", fd) == ""
    assert "more are not taken" in store.add("slab", over)
    assert not is_open(over)
    assert [fd for fd, _ in store.in_order()] == sorted(kept)
    store.clear()


def test_names_that_execve_could_not_carry_are_not_taken() -> None:
    store = DescriptorStore()
    name = "n" * 255
    fd = memfd()
    problem = ""
    while not problem:
        problem = store.add(name, fd := memfd())
    assert "too long together" in problem
    assert not is_open(fd)
    assert len(":".join(name for _, name in store.in_order())) < MAX_NAMES_BYTES
    store.clear()


def test_the_same_file_under_the_same_name_is_kept_once() -> None:
    store = DescriptorStore()
    fd = memfd()
    again = os.dup(fd)
    store.add("slab.0", fd)
    store.add("slab.0", again)
    assert store.in_order() == [(again, "slab.0")]
    assert not is_open(fd)
    other = memfd()
    store.add("slab.0", other)
    assert len(store) == 2
    store.clear()


def test_a_name_removes_all_that_were_stored_under_it() -> None:
    store = DescriptorStore()
    removed, kept = [memfd(), memfd()], memfd()
    for fd in removed:
        store.add("g1.slab.0", fd)
    store.add("g2.slab.0", kept)
    assert store.remove("g1.slab.0") == 2
    assert store.remove("g1.slab.0") == 0
    assert not any(map(is_open, removed))
    assert store.in_order() == [(kept, "g2.slab.0")]
    store.clear()
