"""``wcache uninstall``: takes away the systemd units that ``wcache install`` has put in place."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from wcache.commands.install import (
    DryRunOption,
    RootOption,
    UserOption,
    chosen_target,
    print_change,
    reload_manager,
)
from wcache.commands.options import QuietOption
from wcache.errors import NoPermissionError, UsageError, WcacheError
from wcache.install import Change, Target, plan
from wcache.install import uninstall as uninstall_files
from wcache.output import Output, counted
from wcache.paths import RankId, RankPaths, run_folder
from wcache.ranks import ask
from wcache.units import size


def uninstall(
    user: UserOption = False,
    root: RootOption = None,
    dry_run: DryRunOption = False,
    force: Annotated[bool, typer.Option("--force", help="Also while ranks hold weights.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Take away what wcache install has put in place. Configurations stay.

    Refused while ranks hold weights, unless forced: without its unit a daemon is not started again,
    and its weights go with it. A file that somebody has edited is kept.
    """
    out = Output(quiet=quiet)
    target = chosen_target(user=user, root=root)
    if root is None and not force and not dry_run and (holding := list(_holding())):
        raise WcacheError(
            f"ranks hold weights: {'; '.join(holding)}",
            hint="wcache down frees them; --force leaves them without a unit",
        )
    planned = plan(target, python=sys.executable, systemd_version=sys.maxsize)
    changes: list[Change] = []
    for change in uninstall_files(target, planned, dry_run=dry_run):
        print_change(change)
        changes.append(change)
    if not changes:
        out.say("no units are installed")
    if root is None and any(change.action == "removed" for change in changes):
        reload_manager(user=user, out=out)
    for change in changes:
        if change.action == "kept":
            out.warn(f"{change.path} was edited and is kept: remove it yourself")
    systemctl = "systemctl --user" if user else "systemctl"
    if root is None and (links := _enabled(target)):
        names = " ".join(link.name for link in links)
        out.warn(f"{counted(len(links), 'link')} of units that a boot started lead nowhere now")
        out.hint(f"{systemctl} disable {names}")


def _holding() -> Iterator[str]:
    """A few words for each rank, of any instance, that holds weights or may hold them."""
    for socket in sorted(run_folder().glob("*/control.sock")):
        try:
            paths = RankPaths.of(RankId.parse(socket.parent.name))
        except UsageError:
            continue  # a supervisor's own folder
        try:
            report = ask(paths)
        except NoPermissionError:
            raise
        except WcacheError as error:
            yield error.message
            continue
        held = sum(one.slab_bytes for one in report.generations) if report else 0
        if held:
            yield f"rank {paths.id} {size(held)}"


def _enabled(target: Target) -> list[Path]:
    """Links that ``systemctl enable`` has made and that lead nowhere now."""
    folder = target.units if target.is_user else Path("/etc/systemd/system")
    links = folder.glob("*.wants/wcache*")
    return sorted(link for link in links if link.is_symlink() and not link.exists())
