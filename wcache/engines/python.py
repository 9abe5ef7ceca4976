"""Reading the command line of a Python interpreter, as far as to the program that it runs. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
# Interpreter options whose value may be the next argument.
_WITH_VALUE = "XW"
_LONG_WITH_VALUE = "--check-hash-based-pycs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What an interpreter runs: a module, a file, or neither for code on the command line."""

    module: str = ""
    script: str = ""
    rest: tuple[str, ...] = ()
    """The program's own arguments."""


def program_of(argv: Sequence[str]) -> Program | None:
    """None for a command that is no Python interpreter with a program."""
    if not argv or not _PYTHON.fullmatch(PurePath(argv[0]).name):
        return None
    place = 1
    while place < len(argv):
        word = argv[place]
        if word == "-" or not word.startswith("-"):
            return Program(script=word, rest=tuple(argv[place + 1 :]))
        place += 1
        if word.startswith("--"):
            place += word == _LONG_WITH_VALUE
            continue
        for index, letter in enumerate(word[1:], start=2):
            glued = word[index:]
            if letter in "mc":
                # All that follows is the program's, as the interpreter has it.
                if not glued and place >= len(argv):
                    return None
                name, rest = (glued, argv[place:]) if glued else (argv[place], argv[place + 1 :])
                return Program(module=name if letter == "m" else "", rest=tuple(rest))
            if letter in _WITH_VALUE:
                place += not glued
                break
    return None
