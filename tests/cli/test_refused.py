"""What commands say to a user who may not: one line, who may, and exit code 77."""

from collections.abc import Callable

import pytest

from tests.cli.snapshot import Done
from tests.places import Places, publish_config
from tests.users import without_privileges
from wcache.cli import run

pytestmark = pytest.mark.cli
Refused = Callable[..., Done]


@pytest.fixture
def refused(
    places: Places, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Refused:
    """Runs a command in this process, as a user to whom files of mode 0 are closed."""
    places.root.chmod(0o755)
    places.write_config(publish_config())
    places.instance().run.mkdir()
    monkeypatch.chdir(places.root)

    def call(*words: str) -> Done:
        with without_privileges():
            code = run(words)
        captured = capfd.readouterr()
        return Done(words, captured.out, captured.err, code)

    return call


def test_a_configuration_that_may_not_be_read_is_said(refused: Refused, places: Places) -> None:
    run(["status"])  # imports all that the next call may not
    for barrier in (places.instance().config_file, places.instance().config):
        mode = barrier.stat().st_mode
        barrier.chmod(0)
        done = refused("status")
        barrier.chmod(mode)
        assert done.code == 77
        assert f"error: no permission to read {places.instance().config_file}\n" in done.stderr
        assert f"hint: {barrier} (mode 0) is open to " in done.stderr


@pytest.mark.parametrize("words", [(), ("-f",), ("--json",), ("0", "--daemon")])
def test_logs_that_may_not_be_read_are_said(
    words: tuple[str, ...], refused: Refused, places: Places
) -> None:
    log = places.instance().log_file(0, "daemon")
    log.parent.mkdir(parents=True)
    log.write_text("a line\n")
    run(["logs"])
    for barrier in (log, log.parent):
        mode = barrier.stat().st_mode
        barrier.chmod(0)
        done = refused("logs", *words)
        barrier.chmod(mode)
        assert done.code == 77
        assert "error: no permission to read " in done.stderr
        assert f"hint: {barrier} (mode 0) is open to " in done.stderr
        assert "Traceback" not in done.stderr
