"""Fixtures that every part of the suite shares."""

import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.daemons import start, store
from tests.places import Places

__all__ = ["places", "start", "store"]


def pytest_configure() -> None:
    """Ctrl-C is heard by the tests' processes, also where a shell has begun this one behind it:
    such a one ignores it, and so would all that it starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under WCACHE_NO_SKIP, as in CI, a skip is a failure unless hardware may be absent there."""
    report = yield
    excused = any(item.get_closest_marker(name) for name in ("gpu", "hugepages"))
    if report.skipped and not excused and os.environ.get("WCACHE_NO_SKIP"):
        report.outcome = "failed"
    return report


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    """Run, configuration and state folders of the test's own, also in this process's environment.

    Not under tmp_path: its names are too long for a socket.
    """
    root = Path(tempfile.mkdtemp(prefix="wc"))
    made = Places(root)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield made
    shutil.rmtree(root, ignore_errors=True)
