"""Has the commands in a hint be about the instance that it was given for. Pure."""

import re
from collections.abc import Sequence

from wcache.errors import WcacheError

# Those that are about one instance, and about the default one where none is named.
_COMMAND = re.compile(r"\bwcache (?:up|down|restart|status|verify|warm|rollback|run|logs|doctor)\b")


def for_instance(hint: str, instance: str) -> str:
    """``hint``, with ``--instance`` behind each command of wcache's that it names.

    Pasted as it is, ``wcache down`` would free other weights than those that it is about. One that
    names an instance already is left alone.
    """
    if not instance or "--instance" in hint:
        return hint
    return _COMMAND.sub(lambda found: f"{found[0]} --instance {instance}", hint)


def note(error: WcacheError, instance: str) -> None:
    """Has the hint of ``error`` be shown below its traceback, which is how an engine ends."""
    if error.hint:
        error.add_note(f"hint: {for_instance(error.hint, instance)}")


def instance_of(words: Sequence[str]) -> str:
    """What ``--instance`` says in the words of a command line of wcache's; empty without it."""
    found = ""
    for index, word in enumerate(words):
        if word == "--":
            break  # behind it are the words of an engine
        if word == "--instance":
            found = words[index + 1] if index + 1 < len(words) else ""
        elif word.startswith("--instance="):
            found = word.partition("=")[2]
    return found
