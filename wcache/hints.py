"""Has the commands that are told be about the instance that they are told for. Pure."""

import re
from collections.abc import Sequence

from wcache.errors import WcacheError

PUBLISHED_AFTER_DOWN = (
    "wcache down, once no engine uses them, and wcache up have the next engine publish what is"
    " wanted"
)
"""Of ranks with other weights, where an engine publishes: nothing else is loaded beside them."""
OTHER_PUBLISHED = (
    "wcache down, once no engine uses them, and wcache up --model … --loader publish have the next"
    " engine publish its own"
)
"""As :data:`PUBLISHED_AFTER_DOWN`, to one whose weights the configuration may not name."""
# Those that are about one instance, and about the default one where none is named: neither by its
# option nor by a rank, as in "wcache logs draft:0".
_COMMAND = re.compile(
    r"\bwcache (?:up|down|restart|status|verify|warm|rollback|run|logs|doctor)\b(?! [\w.-]+:[0-9])"
)
_RANK = re.compile(r"([\w.-]+):[0-9]+")


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
    """The instance that the words of a command line of wcache's are about, by ``--instance`` or by
    a rank as ``draft:3``; empty for the default one."""
    found = ""
    # The words of an engine may look like a rank, as localhost:8000 does, and stand without a "--".
    takes_ranks = "run" not in words[:1]
    for index, word in enumerate(words):
        if word == "--":
            break  # behind it are the words of an engine
        if word == "--instance":
            found = words[index + 1] if index + 1 < len(words) else ""
        elif word.startswith("--instance="):
            found = word.partition("=")[2]
        elif takes_ranks and (rank := _RANK.fullmatch(word)):
            found = rank[1]
    return found
