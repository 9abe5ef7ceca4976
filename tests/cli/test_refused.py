"""What commands say to a user who may not: one line, who may, and exit code 77."""

import os
import signal
from collections.abc import Callable

import pytest

from tests.checkpoints import write_llama
from tests.cli.snapshot import Done, wcache
from tests.places import Places, publish_config
from tests.users import without_privileges
from wcache.cli import run

pytestmark = pytest.mark.cli
Refused = Callable[..., Done]
TIMEOUT_S = 60
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs a folder of another user")


@pytest.fixture
def refused(
    places: Places, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Refused:
    """Runs a command in a fork, as a user to whom files of mode 0 are closed."""
    places.root.chmod(0o755)
    places.write_config(publish_config())
    places.instance().run.mkdir()
    monkeypatch.chdir(places.root)

    def call(*words: str) -> Done:
        capfd.readouterr()
        child = os.fork()
        if child == 0:
            signal.alarm(TIMEOUT_S)
            code = 70
            try:
                with without_privileges():
                    code = run(words)
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
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


@pytest.mark.parametrize("words", [("up", "--device", "cpu"), ("fingerprint",)])
@pytest.mark.parametrize("closed", ["model.safetensors", "config.json", "", ".."])
def test_a_model_that_may_not_be_read_is_said(
    closed: str, words: tuple[str, ...], refused: Refused, places: Places
) -> None:
    places.instance().run.chmod(0o777)
    model = write_llama(places.root / "models" / "llama")
    run(["fingerprint", str(model)])
    barrier = (model / closed).resolve()
    mode = barrier.stat().st_mode
    barrier.chmod(0)
    option = ["--model"] if words[0] == "up" else []
    done = refused(*words, *option, str(model))
    barrier.chmod(mode)
    assert done.code == 77
    assert f"error: {model}" in done.stderr
    assert f"hint: {barrier} (mode 0) is open to " in done.stderr


@pytest.mark.parametrize(
    "closed", ["run", pytest.param("run/supervisor", marks=as_root), "etc"]
)  # whoever owns the supervisor's folder opens it
def test_a_supervisor_that_may_not_begin_says_so(
    closed: str, refused: Refused, places: Places
) -> None:
    import wcache.commands.supervise
    import wcache.supervise.direct.parent  # noqa: F401  # what the next call may not import

    places.instance().supervisor_folder.mkdir()
    run_folder = places.instance().run
    run_folder.chmod(0o777)
    if closed == "etc":
        places.instance().supervisor_folder.rmdir()
    barrier = places.root / closed
    barrier.chmod(0)
    done = refused("supervise")
    barrier.chmod(0o700)
    assert done.code == 77
    assert f"hint: {barrier} (mode 0) is open to " in done.stderr


@as_root
@pytest.mark.parametrize("command", ["up", "down", "restart", "supervise"])
def test_nothing_is_written_to_the_run_folder_of_somebody_else(
    command: str, places: Places
) -> None:
    run_folder = places.instance().run
    run_folder.mkdir()
    os.chown(run_folder, 1234, 1234)
    model = write_llama(places.root / "model")
    options = ["--device", "cpu", "--model", str(model)] if command == "up" else []
    if command != "up":
        places.write_config(publish_config())
    done = wcache(places, command, *options)
    assert done.code == 77
    assert f"error: {run_folder} is not a folder of yours\n" in done.stderr
    assert list(run_folder.iterdir()) == []
    assert places.instance().config_file.exists() == (command != "up")
