"""``wcache install``: puts the systemd units in place."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from wcache.commands.options import QuietOption
from wcache.errors import ExitCode, NoPermissionError, WcacheError
from wcache.install import Change, Planned, Target, plan, version_below
from wcache.install import install as install_files
from wcache.machine.interpreter import needed_paths, needs_pythonpath, problems
from wcache.output import Output

UserOption = Annotated[
    bool, typer.Option("--user", help="The units of your own manager, not the system's.")
]
RootOption = Annotated[
    Path | None,
    typer.Option(
        "--root", metavar="DIR", help="Treat DIR as /, as for an image; nothing is reloaded."
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done.")]

_TOOL_TIMEOUT_S = 60


def install(
    user: UserOption = False,
    root: RootOption = None,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
) -> None:
    """Put the systemd units in place, so that a reboot brings the weights back.

    Prints every file. It can be run again at any time, and should be after an upgrade; units that
    run are not touched. A file that somebody has edited is left alone: use systemctl edit, which
    does not change it.
    """
    out = Output(quiet=quiet)
    if not user and root is None and not dry_run and os.geteuid():
        # Before anything: files that are as they should be would hide it until the group is made.
        raise NoPermissionError(
            "units of the system are put in place by root",
            hint="wcache install --user has those of your own manager",
        )
    target = chosen_target(user=user, root=root)
    planned = plan(target, python=sys.executable, systemd_version=_version(root))
    changed = False
    kept: list[Path] = []
    for change in install_files(target, planned, dry_run=dry_run):
        print_change(change)
        changed |= change.action in ("wrote", "removed")
        if change.action == "kept":
            kept.append(change.path)
    if root is None:
        _warn_of_interpreter(target, planned, out)
    elif not (root / sys.executable.lstrip("/")).exists():
        out.warn(f"the units start {sys.executable}, which is not below {root}")
    if root is None and not dry_run:
        if not user:
            _run_tools(target, out)
        reload_manager(user=user, out=out)
    if kept:
        raise WcacheError(
            f"edited, and so left alone: {', '.join(map(str, kept))}",
            hint="move it away and install again; systemctl edit keeps changes in a file apart",
        )
    if changed and root is None:
        out.say(
            "wcache up starts ranks under systemd from here on; those that run stay with their"
            " supervisor until wcache down"
        )


def chosen_target(*, user: bool, root: Path | None) -> Target:
    below = (root or Path("/")).absolute()
    if not user:
        return Target.system(below)
    return Target.user(_config_home(), below)


def _config_home() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config").absolute()


def print_change(change: Change) -> None:
    print(f"{change.action} {change.path}", flush=True)


def reload_manager(*, user: bool, out: Output) -> None:
    """Has the manager read its units again, where one runs."""
    from wcache.supervise.systemd import manager as systemd

    if systemd.is_running(user=user):
        systemd.reload(user=user)
    else:
        out.say("no systemd runs here: the units count from its next start on")


def _version(root: Path | None) -> int:
    from wcache.supervise.systemd import manager as systemd

    return systemd.version() if root is None else version_below(root)


def _warn_of_interpreter(target: Target, planned: list[Planned], out: Output) -> None:
    if not target.is_user:
        unit = next((one.data for one in planned if one.path.name == "wcache@.service"), b"")
        found = list(problems(needed_paths(), unit))
        for problem in found:
            out.warn(problem)
        if found:
            out.hint("install wcache for the system: a virtual environment of root's, below /opt")
    # EnvironmentFile= of the units.
    folder = _config_home() if target.is_user else Path("/etc")
    environment = folder / "wcache/environment"
    if needs_pythonpath(environment):
        out.warn("wcache is found through PYTHONPATH, which the units do not have")
        out.hint(f"pip install wcache, or set PYTHONPATH in {environment} too")


def _run_tools(target: Target, out: Output) -> None:
    """Makes the group and the folders now; the next boot would do so too."""
    import shutil
    import subprocess

    for tool, folder in (
        (["systemd-sysusers"], target.sysusers),
        (["systemd-tmpfiles", "--create"], target.tmpfiles),
    ):
        files = sorted(map(str, folder.glob("wcache*.conf"))) if folder else []
        if not files:
            continue
        command = [*tool, *files]
        if shutil.which(tool[0]) is None:
            out.warn(f"{tool[0]} is not installed, and nothing else reads {files[0]}")
            continue
        try:
            ran = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=_TOOL_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise WcacheError(f"does not end: {' '.join(command)}") from None
        if ran.returncode:
            said = ran.stderr.strip().splitlines() or [f"exit {ran.returncode}"]
            raise WcacheError(
                f"{tool[0]} failed: {said[-1]}",
                hint=f"see what it says: {' '.join(command)}",
                exit_code=ExitCode.FAILED,
            )
