"""Threads in which torch works alone, beside others whose numbers stay what they were."""

import threading
from collections.abc import Iterator

import pytest
import torch

from wcache.memory.threads import in_threads

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def in_new_thread() -> int:
    """The number that a thread has that is started now."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def test_each_thread_has_one_of_torchs_and_keeps_it() -> None:
    together = threading.Barrier(4)

    def work() -> tuple[int, int]:
        together.wait(10)
        return threading.get_ident(), torch.get_num_threads()

    found = in_threads(4, work)
    assert len({thread for thread, _ in found}) == 4
    assert [number for _, number in found] == [1, 1, 1, 1]


def test_threads_of_others_keep_their_numbers_while_ours_work() -> None:
    """Also one that is started in the meantime."""
    seen: list[tuple[int, int]] = []
    asked, answered = threading.Event(), threading.Event()

    def other() -> None:
        torch.get_num_threads()
        asked.wait(10)
        seen.append((torch.get_num_threads(), in_new_thread()))
        answered.set()

    beside = threading.Thread(target=other)
    beside.start()

    def work() -> bool:
        asked.set()
        return answered.wait(10)

    assert in_threads(2, work) == [True, True]
    beside.join()
    assert seen == [(3, 3)]
    assert (torch.get_num_threads(), in_new_thread()) == (3, 3)


def test_a_caller_with_a_number_of_its_own_does_not_pass_it_on() -> None:
    numbers: list[int] = []

    def caller() -> None:
        torch.get_num_threads()
        ready.set()
        changed.wait(10)
        in_threads(1, lambda: None)
        numbers.append(torch.get_num_threads())

    ready, changed = threading.Event(), threading.Event()
    thread = threading.Thread(target=caller)
    thread.start()
    ready.wait(10)
    torch.set_num_threads(2)
    changed.set()
    thread.join()
    assert numbers == [3]
    assert in_new_thread() == 2


def test_the_first_failure_is_raised_when_all_have_ended() -> None:
    before = threading.active_count()
    turn = iter(["fails", "works"])

    def work() -> str:
        if next(turn) == "fails":
            raise LookupError("no such words")
        return "done"

    with pytest.raises(LookupError, match="no such words"):
        in_threads(2, work)
    assert threading.active_count() == before


def test_no_thread_waits_for_one_that_can_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    start = threading.Thread.start
    started: list[str] = []

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("wcache-digest"):
            started.append(thread.name)
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        in_threads(3, lambda: None)
    assert threading.active_count() == before
    assert (torch.get_num_threads(), in_new_thread()) == (3, 3)


def test_no_thread_waits_for_a_number_that_can_not_be_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = threading.active_count()
    start = threading.Thread.start
    started: list[bool] = []

    def limited(thread: threading.Thread) -> None:
        is_ours = thread.name.startswith("wcache-digest")
        if any(started) and not is_ours:
            raise RuntimeError("can't start new thread")
        started.append(is_ours)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        in_threads(2, lambda: None)
    assert threading.active_count() == before
