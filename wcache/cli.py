"""The ``wcache`` command: registers :mod:`wcache.commands`, and turns errors into exit codes."""

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, TextIO

import typer
import typer.main

import wcache
from wcache.errors import ConfigError, ExitCode, WcacheError
from wcache.hints import for_instance, instance_of
from wcache.machine.permissions import as_root
from wcache.streams import StdoutError, stdout_error, talk

INTERRUPTED = 130

# In the order of the help; each is the function of that name in its module.
COMMANDS = (
    "up", "status", "verify", "fingerprint", "warm", "rollback", "restart", "down", "logs",
    "doctor", "install",
    "uninstall", "supervise", "run",
)  # fmt: skip
# What follows the engine's name is the engine's.
_SETTINGS = {"run": {"allow_interspersed_args": False}}


def _version(wanted: bool) -> None:
    if wanted:
        print(f"wcache {wcache.__version__}")
        raise typer.Exit


def _wcache(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Keep a model's finished weights in memory while inference engines come and go.

    Exit codes: 0 done, 1 failed, 2 usage, 3 not ready, 4 no such rank, 5 mismatch or corrupt,
    75 try again, 77 no permission, 78 configuration, 130 interrupted.
    """


def _app(arguments: Sequence[str]) -> typer.Typer:
    """With the command that is called alone, or with all where that is not known yet.

    What a command needs takes longer to import than most commands to run.
    """
    app = typer.Typer(
        name="wcache",
        add_completion=False,
        no_args_is_help=True,
        # Plain help and plain usage errors: the same text on a terminal, in a log and in a test,
        # and rich is not imported for it.
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_wcache)
    called = arguments[0] if arguments else ""
    for name in (called,) if called in COMMANDS else COMMANDS:
        module = importlib.import_module(f"wcache.commands.{name}")
        app.command(name, context_settings=_SETTINGS.get(name))(getattr(module, name))
    return app


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line; returns its exit code. A bug leaves as a traceback."""
    _open_missing_streams()
    _prefix_warnings()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _call(words)
        _flush()
    except StdoutError as error:
        _report(error, words)
        code = _discard(sys.stdout)
    except BrokenPipeError:
        code = _discard(sys.stdout)
    try:
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)
    return code


def _call(words: Sequence[str]) -> int:
    try:
        typer.main.get_command(_app(words)).main(words, prog_name="wcache")
    except StdoutError:
        raise
    except WcacheError as error:
        _report(error, words)
        return error.exit_code
    except KeyboardInterrupt:
        talk("interrupted")
        return INTERRUPTED
    except SystemExit as end:
        # How typer ends every call: after help, a usage error, an Exit, and a plain return.
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return ExitCode.DONE


def _prefix_warnings() -> None:
    """What modules log in a command that sets up no log: as a command's own warnings are."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(logging.Formatter("warning: %(message)s"))


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise stdout_error(error) from None


def _open_missing_streams() -> None:
    """Of stdin, stdout and stderr, those that the caller has closed.

    The next file to be opened would get such a descriptor, and be written to as if it were stdout.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is this one
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r"))


def _report(error: WcacheError, words: Sequence[str]) -> None:
    problems = error.problems if isinstance(error, ConfigError) else ()
    for line in problems or (error.message,):
        talk(f"error: {line}")
    if error.hint:
        talk(f"hint: {for_instance(error.hint, instance_of(words))}")
    if error.exit_code is ExitCode.NO_PERMISSION and os.geteuid():
        talk(f"hint: as root: {as_root(words)}")


def _discard(stream: TextIO) -> int:
    """For a stream whose reader has left, as ``head`` does, or whose disk is full.

    The interpreter flushes both once more at its end, and would make it an exit code of its own.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return ExitCode.FAILED
