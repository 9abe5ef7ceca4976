"""How ``wcache run`` starts scripts: by python, torchrun or accelerate. Without torch."""

from collections.abc import Sequence
from pathlib import Path, PurePath

from wcache.config import Loader
from wcache.engines.interface import Launch, Mark, Probe, Wish
from wcache.engines.orders import Orders
from wcache.engines.python import program_of
from wcache.errors import UsageError

NAME = "transformers"

_TORCHRUN = ("torch.distributed.run", "torch.distributed.launch", "torchrun")
_ACCELERATE = ("accelerate.commands.launch",)
# How many processes a launcher starts, by options of which each counts for a factor.
_FACTORS = {
    "torchrun": ("--nproc-per-node", "--nnodes"),
    "accelerate": ("--num-processes",),
    "python": (),
}
_MAX_PROCESSES = 1 << 20


class Transformers:
    """A script that calls ``from_cache()``; see :class:`wcache.engines.interface.Engine`.

    Nothing tells such a script from any other before it runs, so each gets its orders, by the
    environment alone, and one that never asks the cache runs as it would without wcache.
    """

    name = NAME
    marks: Sequence[Mark] = ()
    runs_ranks_in_order = False
    """``from_cache()`` computes on the GPU that has the weights."""

    def loaders(self, wish: Wish) -> Sequence[Loader]:
        """A checkpoint's own layout is what transformers computes with."""
        del wish
        return ("safetensors",)

    def recognises(self, argv: Sequence[str]) -> bool:
        return _launcher(argv) is not None

    def wish(self, argv: Sequence[str]) -> Wish:
        launcher = _launcher(argv)
        if launcher is None:
            raise UsageError(f"{argv[0] if argv else 'nothing'} does not run a script")
        kind, rest = launcher
        tp = 1
        for option in _FACTORS[kind]:
            tp *= _number(option, _value(rest, option))
        return Wish(tp=tp)

    def launch(self, argv: Sequence[str], orders: Orders) -> Launch:
        program = program_of(argv)
        script = program.script if program is not None else ""
        if script not in ("", "-") and not Path(script).exists():
            raise UsageError(
                f"no such script: {script}", hint="a path counts from the folder you are in"
            )
        return Launch(argv=tuple(argv), environment=orders.environment())

    def probe(self, argv: Sequence[str]) -> Probe | None:
        """None: the script says itself when it is ready, by :func:`wcache.first_token`."""
        del argv
        return None


def _launcher(argv: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """What starts the processes, and its arguments; None for a command that runs no script."""
    if not argv:
        return None
    name, rest = PurePath(argv[0]).name, tuple(argv[1:])
    program = program_of(argv)
    if program is not None:
        # A launcher that was installed with the interpreter is a script of it.
        name, rest = program.module or PurePath(program.script).name, program.rest
    if name in _TORCHRUN:
        return "torchrun", rest
    if name in _ACCELERATE or (name == "accelerate" and rest[:1] == ("launch",)):
        return "accelerate", rest
    return ("python", rest) if program is not None or name.endswith(".py") else None


def _value(arguments: Sequence[str], option: str) -> str | None:
    """The value of a launcher's ``option``, in any of its spellings; None without one."""
    found = None
    for index, argument in enumerate(arguments):
        if argument.endswith(".py"):
            break  # what follows is the script's
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == option:
            found = value if equals else "".join(arguments[index + 1 : index + 2])
    return found


def _number(option: str, text: str | None) -> int:
    if text is None:
        return 1
    if text in ("gpu", "auto", "cpu"):
        return _devices(text)
    first = text.partition(":")[0]  # nodes may be a range, of which this many come at least
    if not (first.isascii() and first.isdigit() and 0 < int(first) <= _MAX_PROCESSES):
        raise UsageError(f"{option} is {text!r}, not a positive number")
    return int(first)


def _devices(kind: str) -> int:
    import os

    from wcache.machine.devices import visible_gpus

    gpus = 0 if kind == "cpu" else len(visible_gpus())
    return gpus or os.cpu_count() or 1
