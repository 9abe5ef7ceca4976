"""Writes the table of methods into a document: ``python -m wcache.gate [README.md]``."""

import sys
from pathlib import Path

from wcache.gate.methods import table

BEGIN = "<!-- methods: python -m wcache.gate README.md writes this table -->\n"
END = "<!-- end of methods -->\n"


def written_into(text: str) -> str:
    """``text`` with the table between its markers; raises ValueError when it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError("the document has no markers for the table of methods")
    return f"{before}{BEGIN}{table()}{END}{after}"


def main(arguments: list[str]) -> None:
    if not arguments:
        sys.stdout.write(table())
        return
    path = Path(arguments[0])
    path.write_text(written_into(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
