"""Commands whose stdout or stderr can not be written, or was closed by the caller."""

import subprocess
import sys

import pytest

from tests.checkpoints import write_llama
from tests.cli.snapshot import environment
from tests.places import Places

pytestmark = pytest.mark.cli


def shell(
    places: Places, redirections: str, *words: str, buffering: str = ""
) -> subprocess.CompletedProcess[str]:
    line = f'unset PYTHONUNBUFFERED; exec env {buffering} "$@" {redirections}'
    return subprocess.run(
        ["sh", "-c", line, "sh", sys.executable, "-m", "wcache", *words],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        env=environment(places),
    )  # fmt: skip


@pytest.mark.parametrize("buffering", ["", "PYTHONUNBUFFERED=1"])
@pytest.mark.parametrize("form", ["", "--json"])
def test_a_full_disk_below_stdout_is_one_line_and_a_failure(
    places: Places, buffering: str, form: str
) -> None:
    model = write_llama(places.root / "model")
    words = ["fingerprint", str(model), "--device", "cpu", *filter(None, [form])]
    ran = shell(places, ">/dev/full", *words, buffering=buffering)
    assert ran.stderr == "error: stdout can not be written: no space left on device\n"
    assert ran.returncode == 1


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_the_caller_closed_is_as_good_as_dev_null(
    places: Places, closed: str
) -> None:
    ran = shell(places, closed, "status")
    assert ran.returncode == 4
    assert "Traceback" not in ran.stderr
    ran = shell(places, closed, "--version")
    assert ran.returncode == 0
    assert ran.stdout.startswith("wcache ") == (">&-" not in closed.replace("2>&-", ""))


def test_talk_that_nobody_can_hear_does_not_change_what_a_command_does(places: Places) -> None:
    ran = shell(places, "2>/dev/full", "status")
    assert ran.returncode == 4
