"""What the survival run hands back: a row for each event, as a table or as JSON."""

import msgspec

from wcache.output import Table
from wcache.units import size

NOTES = """
READY AFTER: from the command, its own start included, or the signal, to the ready file of the
daemon that serves then. READ BY DAEMON: rchar of /proc/PID/io, of the same daemon since the event
where it went on; FROM DISK: read_bytes. OF CHECKPOINT: nobody has opened its files, which lay
elsewhere; in the last row all that the loader has read, its modules included. LOOKS: how often the
attached engine has read all weights meanwhile."""


class Row(msgspec.Struct, kw_only=True):
    """What one event did."""

    event: str
    ready_ms: float | None = None
    """From the command or signal to the ready file of the daemon that serves then."""
    gap_ms: float | None = None
    """Of it, without a daemon: from the end of the old one."""
    read_bytes: int | None = None
    """By read(2) and its kin, also from the page cache, by the daemon that serves then."""
    disk_bytes: int | None = None
    checkpoint_bytes: int | None = None
    """0 when nobody has opened its files; where they were loaded, all that the loader has read."""
    same_digest: bool | None = None
    lease: str = "-"
    looks: int | None = None
    """How often the engine has read all weights meanwhile, and found them unchanged."""


class Result(msgspec.Struct, kw_only=True):
    """The whole of --json."""

    supervisor: str
    device: str
    weight_bytes: int
    rows: list[Row]
    not_shown: list[str]


def table(rows: list[Row]) -> Table:
    made = Table("EVENT", ">READY AFTER ms", ">OF IT NO DAEMON ms", ">READ BY DAEMON", ">FROM DISK",
                 ">OF CHECKPOINT", "SAME DIGEST", "LEASE", ">LOOKS")  # fmt: skip

    def ms(value: float | None) -> str | None:
        return None if value is None else f"{value:.0f}"

    def nbytes(value: int | None) -> str | None:
        return None if value is None else size(value)

    for row in rows:
        made.add(
            row.event, ms(row.ready_ms), ms(row.gap_ms), nbytes(row.read_bytes),
            nbytes(row.disk_bytes), nbytes(row.checkpoint_bytes),
            {True: "yes", False: "NO", None: None}[row.same_digest], row.lease, row.looks,
        )  # fmt: skip
    return made
