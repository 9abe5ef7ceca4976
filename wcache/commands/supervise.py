"""``wcache supervise``: the supervisor itself, in the foreground, where there is no systemd."""

import typer

from wcache.commands.options import InstanceOption


def supervise(instance: InstanceOption = "") -> None:
    """Run this node's ranks in the foreground, without systemd.

    What a container's entry point calls. Starts the configured ranks, keeps their weights over
    restarts and crashes of the daemons, and frees them when it is stopped with SIGTERM or Ctrl-C.
    """
    from wcache.supervise.direct.parent import run

    raise typer.Exit(run(instance, start_configured=True))
