"""``wcache doctor``: what is wrong with this machine or instance, and how to mend it."""

import os
import sys
import time
from pathlib import Path

import typer

from wcache.commands.options import InstanceOption, JsonOption
from wcache.output import Output, Table
from wcache.paths import InstancePaths


def doctor(instance: InstanceOption = "", as_json: JsonOption = False) -> None:
    """Look for what is wrong or will be, and say the command that mends it. Changes nothing.

    Exits with 1 when anything fails; a warning works now, and may cost weights or time later.
    """
    from wcache.commands.install import chosen_target
    from wcache.doctor import Manager, diagnose, gather
    from wcache.install import plan
    from wcache.supervise import supervisor_for
    from wcache.supervise.systemd import manager as systemd

    here = systemd.manager_here()
    user = here == "user" if here else os.geteuid() != 0
    target = chosen_target(user=user, root=None)
    version = systemd.version() if here else 0
    overrides = () if user else (Path("/etc/systemd/system"), Path("/run/systemd/system"))
    manager = Manager(version=version, target=target, overrides=overrides)
    paths = InstancePaths.of(instance)
    evidence = gather(paths, supervisor_for(paths.instance), manager, time.time())
    planned = plan(target, python=sys.executable, systemd_version=version)
    found = diagnose(evidence, planned)
    table = Table("CHECK", "RESULT", "DETAIL", "MEND")
    for finding in found.findings:
        table.add(finding.check, finding.result, finding.detail, finding.mend or None)
    Output(as_json=as_json).data(found, table)
    raise typer.Exit(found.exit_code)
