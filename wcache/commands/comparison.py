"""What ``wcache fingerprint`` shows: one fingerprint, or where two are not the same."""

import msgspec

from wcache.checkpoint import diff
from wcache.checkpoint.folder import CONFIG
from wcache.commands.sources import Source
from wcache.fingerprint import Fingerprint, differences, text_of
from wcache.output import Table, one_line

_SHOWN_CHARACTERS = 200


class FieldDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A field that has two values."""

    field: str
    this: str
    other: str


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two that were compared."""

    name: str
    fingerprint: Fingerprint


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of ``fingerprint --diff --json`` and ``--running --json``."""

    version: int = 1
    same: bool
    this: Side
    other: Side
    differences: tuple[FieldDifference, ...]
    """Fields that make the weights others; a value that one side does not know is ``unknown``."""
    not_compared: tuple[FieldDifference, ...]
    """Fields with two values that leave the weights the same: names, versions."""
    files: tuple[str, ...]
    """Files of the checkpoints that differ, where both could be looked at."""
    same_layout: bool
    """All of ``files`` have the same header and size on both sides: other values, or other times
    alone, since a time is a part of what a file is known by."""


def compared(this: Source, other: Source) -> Comparison:
    """Compares field by field."""
    found = differences(this.fingerprint, other.fingerprint)
    named = {entry.field.partition(".")[0] for entry in found}
    passed = []
    for field in msgspec.structs.fields(Fingerprint):
        one, two = getattr(this.fingerprint, field.name), getattr(other.fingerprint, field.name)
        if field.name not in named and one is not None and two is not None and one != two:
            passed.append(FieldDifference(field=field.name, this=text_of(one), other=text_of(two)))
    files: tuple[str, ...] = ()
    if this.identity is not None and other.identity is not None:
        files = diff(this.identity.shards, other.identity.shards)
        if "content" in named and not files:
            files = (CONFIG,)
    return Comparison(
        same=not found,
        this=Side(name=this.name, fingerprint=this.fingerprint),
        other=Side(name=other.name, fingerprint=other.fingerprint),
        differences=tuple(
            FieldDifference(field=entry.field, this=entry.cached, other=entry.wanted)
            for entry in found
        ),
        not_compared=tuple(passed),
        files=files,
        same_layout=bool(files) and files != (CONFIG,) and _headers(this) == _headers(other),
    )


def _headers(source: Source) -> list[tuple[str, int, str]]:
    shards = source.identity.shards if source.identity else ()
    return [(shard.name, shard.nbytes, shard.header) for shard in shards]


def fields(fingerprint: Fingerprint) -> Table:
    """A row for every field that is known, and for every switch."""
    table = Table("FIELD", "VALUE")
    for field in msgspec.structs.fields(Fingerprint):
        value = getattr(fingerprint, field.name)
        if isinstance(value, dict) and value:
            for name in sorted(value):
                table.add(*_cells(f"switches.{name}", value[name]))
        elif value is not None:
            table.add(*_cells(field.name, text_of(value)))
    return table


def rows(found: Comparison) -> Table:
    """A row for every field that has two values."""
    table = Table("FIELD", "THIS", "OTHER", "RESULT")
    for entry in found.differences:
        table.add(*_cells(entry.field, entry.this, entry.other), "mismatch")
    for entry in found.not_compared:
        table.add(*_cells(entry.field, entry.this, entry.other), "not compared")
    return table


def _cells(*texts: str) -> list[str]:
    """A file may say anything; what is shown of it stays in its cell."""
    return [one_line(text, _SHOWN_CHARACTERS) for text in texts]
