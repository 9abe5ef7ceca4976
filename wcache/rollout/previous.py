"""The configuration of what was served before: kept beside the one of what is."""

from collections.abc import Iterable

import msgspec

from wcache.config import AccessSection, Config, load_config
from wcache.paths import InstancePaths
from wcache.ranks import RankView
from wcache.rollout.write import write_config


def save(paths: InstancePaths, changed: Iterable[RankView], old: Config | None) -> None:
    """Writes what ranks serve that are about to serve something else.

    ``old`` is the file's configuration, for ranks that do not know what theirs goes with. Where
    ranks serve nothing the file stays as it is; raises :class:`wcache.errors.WcacheError`.
    """
    serving = [one for one in changed if one.serving is not None]
    if not serving:
        return
    first = serving[0].serving
    found = first.config if first is not None else None
    if found is None and old is not None and all(one.serves(old) for one in serving):
        found = old
    if found is None:
        # Not known: the one before it would be taken for it.
        paths.previous_file.unlink(missing_ok=True)
        return
    access = old.access if old is not None else AccessSection()
    write_config(msgspec.structs.replace(found, access=access), paths.previous_file)


def load(paths: InstancePaths) -> Config | None:
    """None when there is none; raises :class:`wcache.errors.ConfigError` for a bad one."""
    return load_config(paths.previous_file) if paths.previous_file.exists() else None
