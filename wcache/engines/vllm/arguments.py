"""Reading a vLLM command line, as far as wcache must understand it. Pure."""

import re
from collections.abc import Sequence
from pathlib import PurePath

from wcache.errors import UsageError

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_SERVER = "vllm.entrypoints.openai.api_server"
_MAIN = ("vllm.entrypoints.cli.main", "vllm")
# Interpreter options that have a value of their own behind them.
_WITH_VALUE = ("-X", "-W")

SHORT = {
    "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size", "-q": "--quantization",
}  # fmt: skip


class Arguments:
    """What follows the name of vLLM's server: a model, and options in any of their spellings."""

    def __init__(self, positional: str | None, options: Sequence[str]) -> None:
        self._positional = positional
        self._options = options

    @classmethod
    def of(cls, argv: Sequence[str]) -> "Arguments | None":
        """None for a command that is not vLLM's API server."""
        rest = _behind_server(argv)
        if rest is None:
            return None
        is_positional = bool(rest) and not rest[0].startswith("-") and not _is_module(argv)
        return cls(rest[0], rest[1:]) if is_positional else cls(None, rest)

    @property
    def model(self) -> str | None:
        """As it was given first behind ``serve``, or by ``--model``."""
        return self._positional or self.value("--model")

    def has(self, option: str) -> bool:
        """Whether ``option`` was given at all, with a value or as a flag."""
        return any(name == option or name.startswith(f"{option}.") for name in self._names())

    def value(self, option: str) -> str | None:
        """The value of ``option``, the last one where it is there twice; None without one."""
        found = None
        for index, argument in enumerate(self._options):
            name, equals, value = _split(argument)
            if name != option:
                continue
            following = self._options[index + 1] if index + 1 < len(self._options) else None
            found = value if equals else following
        return found

    def number(self, option: str, default: int) -> int:
        """Raises :class:`UsageError` for a value that is no positive number."""
        text = self.value(option)
        if text is None and not self.has(option):
            return default
        if text is None or not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 20):
            raise UsageError(f"{option} is {text!r}, not a positive number")
        return int(text)

    def _names(self) -> list[str]:
        return [_split(argument)[0] for argument in self._options]


def _split(argument: str) -> tuple[str, str, str]:
    """(long name with hyphens, ``=`` or nothing, value); vLLM takes underscores for hyphens."""
    if not argument.startswith("-"):
        return "", "", ""
    name, equals, value = argument.partition("=")
    if name.startswith("--"):
        name = name.replace("_", "-")
    return SHORT.get(name, name), equals, value


def _behind_server(argv: Sequence[str]) -> Sequence[str] | None:
    if not argv:
        return None
    name = PurePath(argv[0]).name
    if name == "vllm":
        return argv[2:] if tuple(argv[1:2]) == ("serve",) else None
    if not _PYTHON.fullmatch(name):
        return None
    place = _first_of_program(argv)
    if place >= len(argv):
        return None
    if argv[place] == "-m":
        module, rest = argv[place + 1 : place + 2], argv[place + 2 :]
        if tuple(module) == (_SERVER,):
            return rest
        is_main = bool(module) and module[0] in _MAIN
        return rest[1:] if is_main and rest and rest[0] == "serve" else None
    is_script = PurePath(argv[place]).name == "vllm" and tuple(argv[place + 1 : place + 2])
    return argv[place + 2 :] if is_script == ("serve",) else None


def _first_of_program(argv: Sequence[str]) -> int:
    """Index of the script, or of ``-m``, behind the interpreter's own options."""
    place = 1
    while place < len(argv) and argv[place].startswith("-") and argv[place] != "-m":
        place += 2 if argv[place] in _WITH_VALUE else 1
    return place


def _is_module(argv: Sequence[str]) -> bool:
    """The older server takes its model by option alone."""
    return _SERVER in argv
