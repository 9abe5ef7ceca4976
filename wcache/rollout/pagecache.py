"""``wcache warm --page-cache``: has the system read a checkpoint ahead, and does nothing else."""

import time
from collections.abc import Sequence

import msgspec

from wcache.checkpoint.readahead import file_ranges, read_ahead, total_bytes
from wcache.config import Config, load_config
from wcache.errors import NoSuchRankError, OutOfMemoryError
from wcache.memory.available import available_bytes
from wcache.output import Output, counted
from wcache.paths import InstancePaths
from wcache.ranks import rank_words
from wcache.rollout.candidate import candidate, checkpoint_of
from wcache.rollout.wanted import Args
from wcache.units import duration, size

_LABEL = "page cache"


class ReadAhead(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of ``warm --page-cache --json``."""

    version: int = 1
    folder: str
    files: int
    bytes: int
    available_bytes: int
    """Memory that the page cache may take."""
    seconds: float | None = None
    """None where nothing was read, with ``--dry-run``."""


def read(
    args: Args,
    paths: InstancePaths,
    ranks: Sequence[int],
    out: Output,
    *,
    previous: bool,
    dry_run: bool,
) -> None:
    """Reads what ``ranks``, or all of this node, will need of the checkpoint.

    Raises :class:`OutOfMemoryError` when it is more than the page cache could hold.
    """
    from wcache.load.architectures import Architectures
    from wcache.load.placement import placement

    wanted = candidate(args, load_config(paths.config_file), paths, previous=previous)
    checkpoint, config = checkpoint_of(wanted, paths), wanted.config
    architectures = Architectures(paths.architecture_folder, tell=out.say)
    spread = placement(checkpoint, config, architectures)
    ranges = file_ranges(
        target.source
        for _, planned in spread.of_each_stage(_ranks(config, ranks))
        for target in planned.targets
    )
    nbytes, room = total_bytes(ranges), available_bytes()
    what = f"{size(nbytes)} of {counted(len(ranges), 'file')} in {checkpoint.path}"
    if nbytes > room:
        # It would push out its own beginning, and whatever else is cached.
        raise OutOfMemoryError(
            f"the page cache can not hold {what}: {size(room)} of memory is available",
            hint="the load reads it from the disk as well; name fewer ranks to read less",
        )
    told = ReadAhead(
        folder=str(checkpoint.path), files=len(ranges), bytes=nbytes, available_bytes=room
    )
    if dry_run:
        out.say(f"{what} would be read, {size(room)} of memory is available")
        out.data(told)
        return
    begun = time.monotonic()
    with out.bars([_LABEL]) as bars:
        read_ahead(checkpoint.path, ranges, lambda done: bars.step(_LABEL, "read", done, nbytes))
        seconds = time.monotonic() - begun
        speed = nbytes / max(seconds, 1e-6) / 1e9
        bars.end(_LABEL, f"{what} read in {duration(seconds)}, {speed:.2f} GB/s")
    out.data(msgspec.structs.replace(told, seconds=seconds))


def _ranks(config: Config, named: Sequence[int]) -> Sequence[int]:
    local = config.ranks.local_ranks()
    if unknown := [rank for rank in named if rank not in local]:
        raise NoSuchRankError(
            f"there is no rank {unknown[0]} in the configuration",
            hint=f"this node has {rank_words(local)}",
        )
    return list(named) or list(local)
