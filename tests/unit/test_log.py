"""What daemons, loaders and supervisors log, by the environment's word."""

import logging
from collections.abc import Iterator

import pytest

from wcache.log import LEVEL_VARIABLE, setup_logging

pytestmark = pytest.mark.unit


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    found = logging.getLogger()
    handlers, level = found.handlers[:], found.level
    yield found
    found.handlers[:] = handlers
    found.setLevel(level)


@pytest.mark.parametrize(
    ("said", "level"), [("debug", logging.DEBUG), ("ERROR", logging.ERROR), ("", logging.INFO)]
)
def test_the_environment_says_what_is_logged(
    said: str, level: int, root: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, said)
    setup_logging("daemon", "0")
    assert root.level == level


@pytest.mark.parametrize("said", ["verbose", "10", "a\nb"])
def test_what_is_no_level_is_said_and_ends_nobody(
    said: str,
    root: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, said)
    setup_logging("daemon", "0")
    assert root.level == logging.INFO
    (line,) = capsys.readouterr().err.splitlines()
    assert LEVEL_VARIABLE in line
