"""Fixtures that every part of the suite shares."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemons import start, store
from tests.places import Places

__all__ = ["places", "start", "store"]


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
