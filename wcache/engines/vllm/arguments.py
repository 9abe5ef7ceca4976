"""Reading a vLLM command line, as far as wcache must understand it. Pure."""

from collections.abc import Sequence
from pathlib import PurePath

from wcache.engines.python import program_of
from wcache.errors import UsageError

_SERVER = "vllm.entrypoints.openai.api_server"
_MAIN = ("vllm.entrypoints.cli.main", "vllm")

SHORT = {
    "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size", "-q": "--quantization",
}  # fmt: skip
# Whatever wcache asks for. None of vLLM's own options is the beginning of one of these, so that
# what is, and of one alone, is an abbreviation: vLLM's parser takes them, or says that it does not.
LONG = (
    "--api-key", "--config", "--cpu-offload-gb", "--data-parallel-size", "--dtype", "--enable-eplb",
    "--enable-sleep-mode", "--gpu-memory-utilization", "--grpc", "--headless", "--host",
    "--kv-cache-memory-bytes", "--load-format", "--model", "--pipeline-parallel-size", "--port",
    "--quantization", "--revision", "--runner", "--served-model-name", "--ssl-certfile",
    "--ssl-keyfile", "--tensor-parallel-size", "--uds", "--weight-transfer-config",
)  # fmt: skip


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
        assert option in LONG
        return any(name == option or name.startswith(f"{option}.") for name in self._names())

    def value(self, option: str) -> str | None:
        """The value of ``option``, the last one where it is there twice; None without one."""
        assert option in LONG
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
    """(whole long name with hyphens, ``=`` or nothing, value).

    vLLM takes underscores for hyphens, and its parser the value of ``-q`` right behind it.
    """
    if not argument.startswith("-"):
        return "", "", ""
    name, equals, value = argument.partition("=")
    if name.startswith("--"):
        # Behind a dot comes the name of a field, which is JSON's.
        name, dot, field = name.partition(".")
        return _whole(name.replace("_", "-")) + dot + field, equals, value
    if argument.startswith("-q") and name != "-q":
        return SHORT["-q"], "=", argument.removeprefix("-q")
    return SHORT.get(name, name), equals, value


def _whole(name: str) -> str:
    """What ``name`` is short for; itself when it is whole, none of ours, or short for several."""
    found = [option for option in LONG if option.startswith(name)]
    return found[0] if len(found) == 1 and len(name) > len("--") else name


def _behind_server(argv: Sequence[str]) -> Sequence[str] | None:
    if not argv:
        return None
    if PurePath(argv[0]).name == "vllm":
        return argv[2:] if tuple(argv[1:2]) == ("serve",) else None
    program = program_of(argv)
    if program is None:
        return None
    if program.module == _SERVER:
        return program.rest
    is_main = program.module in _MAIN or PurePath(program.script).name == "vllm"
    return program.rest[1:] if is_main and program.rest[:1] == ("serve",) else None


def _is_module(argv: Sequence[str]) -> bool:
    """The older server takes its model by option alone."""
    return _SERVER in argv
