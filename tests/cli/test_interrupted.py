"""Ctrl-C before a command has begun: its imports are most of the time of many."""

import subprocess
import sys

import pytest

from tests.cli.snapshot import environment
from tests.places import Places

pytestmark = pytest.mark.cli

# SIGINT while the module of that name is looked for, as from a terminal.
PROGRAM = """
import os, signal, sys
late = sys.argv.pop(1)
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == late:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from wcache.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["wcache.cli", "typer", "wcache.commands.status"])
def test_an_import_that_is_interrupted_is_no_traceback(module: str, places: Places) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, "status"],
        env=environment(places), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 130
    assert done.stderr in ("", "interrupted\n")
