"""The ``wcache`` command: registers :mod:`wcache.commands`, and turns errors into exit codes."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
import typer.main

import wcache
from wcache.commands.doctor import doctor
from wcache.commands.down import down
from wcache.commands.install import install
from wcache.commands.logs import logs
from wcache.commands.restart import restart
from wcache.commands.run import run as run_command
from wcache.commands.status import status
from wcache.commands.supervise import supervise
from wcache.commands.uninstall import uninstall
from wcache.commands.up import up
from wcache.commands.verify import verify
from wcache.errors import ConfigError, ExitCode, WcacheError

INTERRUPTED = 130

app = typer.Typer(
    name="wcache",
    add_completion=False,
    no_args_is_help=True,
    # Plain help and plain usage errors: the same text on a terminal, in a log and in a test, and
    # rich is not imported for it.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"wcache {wcache.__version__}")
        raise typer.Exit


@app.callback()
def _wcache(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Keep a model's finished weights in memory while inference engines come and go.

    Exit codes: 0 done, 1 failed, 2 usage, 3 not ready, 4 no such rank, 5 mismatch or corrupt,
    75 try again, 77 no permission, 78 configuration.
    """


_COMMANDS = (
    up, status, verify, restart, down, logs, doctor, install, uninstall, supervise,
)  # fmt: skip
for _command in _COMMANDS:
    app.command()(_command)
# What follows the engine's name is the engine's.
app.command("run", context_settings={"allow_interspersed_args": False})(run_command)


def main() -> None:
    """The console script."""
    sys.exit(run())


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line; returns its exit code. A bug leaves as a traceback."""
    command = typer.main.get_command(app)
    try:
        command.main(list(sys.argv[1:] if arguments is None else arguments), prog_name="wcache")
        sys.stdout.flush()
    except WcacheError as error:
        _report(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as end:
        # How typer ends every call: after help, a usage error, an Exit, and a plain return.
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            return _reader_gone()
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return ExitCode.DONE


def _report(error: WcacheError) -> None:
    problems = error.problems if isinstance(error, ConfigError) else ()
    for line in problems or (error.message,):
        print(f"error: {line}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


def _reader_gone() -> int:
    """Whoever read our stdout has left, as ``head`` does: nothing to say, nobody to say it to."""
    # The interpreter flushes stdout once more at its end; that must not raise again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.FAILED
