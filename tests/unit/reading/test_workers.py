"""The threads of a reader: all tasks done, the first error raised, none left."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import wait_for
from tests.reading import readers
from wcache.errors import CheckpointError
from wcache.load.reading import numa
from wcache.load.reading.workers import work, worker_count

pytestmark = pytest.mark.unit

Task = Callable[[int], int]


@contextmanager
def doing(task: Task) -> Iterator[Task]:
    yield task


def test_all_tasks_are_done_and_told_in_the_calling_thread() -> None:
    done: list[int] = []
    told: list[tuple[int, int]] = []

    def one(task: int) -> int:
        done.append(task)
        return task

    work(
        iter(range(1, 101)), lambda: doing(one), 4,
        lambda nbytes: told.append((nbytes, threading.get_ident())),
    )  # fmt: skip
    assert sorted(done) == list(range(1, 101))
    assert told[-1] == (5050, threading.get_ident())
    assert {thread for _, thread in told} == {threading.get_ident()}


def test_the_first_error_ends_all_threads_and_is_the_one_that_is_raised() -> None:
    closed: list[str] = []

    @contextmanager
    def worker() -> Iterator[Task]:
        try:
            yield one
        finally:
            closed.append(threading.current_thread().name)

    def one(task: int) -> int:
        if task == 10:
            raise CheckpointError("ten")
        time.sleep(0.001)
        return 1

    endless = iter(range(1, 10**9))
    with pytest.raises(CheckpointError, match="ten"):
        work(endless, worker, 3, lambda _: None)
    assert len(closed) == 3
    assert readers() == []
    assert next(endless) < 10**6


def test_an_error_of_a_workers_set_up_or_of_the_tasks_is_raised() -> None:
    @contextmanager
    def broken() -> Iterator[Task]:
        if worker_count(on_host=True):
            raise MemoryError
        yield abs

    def tasks() -> Iterator[int]:
        yield 1
        raise CheckpointError("no more")

    with pytest.raises(MemoryError):
        work(iter([1, 2]), broken, 2, lambda _: None)
    with pytest.raises(CheckpointError, match="no more"):
        work(tasks(), lambda: doing(lambda task: task), 2, lambda _: None)


def test_ctrl_c_ends_the_threads() -> None:
    def one(task: int) -> int:
        if task == 5:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.001)
        return 1

    with pytest.raises(KeyboardInterrupt):
        work(iter(range(10**9)), lambda: doing(one), 2, lambda _: None)
    assert readers() == []


def test_there_are_some_workers_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, host, gpu in ((1, 4, 4), (12, 12, 8), (200, 16, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert (worker_count(on_host=True), worker_count(on_host=False)) == (host, gpu)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("5\n", {5}), ("", set()), ("\n", set()), ("x,1-,2", {1, 2})],
)
def test_lists_of_cpus_are_read_as_the_kernel_writes_them(text: str, expected: set[int]) -> None:
    assert numa.cpus(text) == expected


def test_a_thread_is_bound_beside_the_gpu_and_no_other_is(tmp_path: Path) -> None:
    mine = os.sched_getaffinity(0)
    near = {min(mine)}
    for address, text in (("0000:3b:00.0", f"{min(mine)},9999"), ("0000:5e:00.0", "9999")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "local_cpulist").write_text(text)
    found: dict[str, set[int]] = {}

    def bound(address: str) -> None:
        numa.bind_near(address, tmp_path)
        found[address] = os.sched_getaffinity(0)

    for address in ("0000:3b:00.0", "0000:5e:00.0", "0000:00:00.0"):
        thread = threading.Thread(target=bound, args=(address,))
        thread.start()
        thread.join()
    assert found == {"0000:3b:00.0": near, "0000:5e:00.0": mine, "0000:00:00.0": mine}
    assert os.sched_getaffinity(0) == mine


def test_a_thread_whose_start_was_interrupted_begins_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[str] = []

    @contextmanager
    def worker() -> Iterator[Task]:
        begun.append(threading.current_thread().name)
        yield lambda _: 1

    class Interrupted(threading.Thread):
        def start(self) -> None:
            super().start()
            if self.name.endswith("1"):
                raise KeyboardInterrupt

    monkeypatch.setattr(threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        work(iter(range(10**9)), worker, 2, lambda _: None)
    wait_for(lambda: readers() == [], "both threads have ended")
    assert begun == []
