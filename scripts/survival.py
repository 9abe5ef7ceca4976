"""What weights survive, event by event, while their checkpoint is out of reach: one table.

    scripts/survival.sh [--device cpu|cuda] [--size 16GiB] [--supervisor auto|systemd|direct]

Loads a random Qwen3, or a copy of --model, into rank 0 under a systemd of the run's own or under
`wcache supervise`, attaches an engine that goes on reading all weights, and restarts, kills, hangs
and upgrades the daemon. Exits with 1 when any claim does not hold. Everything runs in folders of
its own and is gone afterwards.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from survival_checkpoint import Checkpoint
from survival_hosts import DirectHost, Host, LabHost
from survival_run import Run, say
from survival_table import NOTES, Result, table

from tests.systemd.lab import CHECKOUT, SCRIPT, FailedCommand
from wcache.commands.options import parse_size
from wcache.output import Output
from wcache.units import size


def chosen_host(arguments: argparse.Namespace, scratch: Path) -> Host:
    """Begun: systemd's if it can be had, else wcache's own, unless one is insisted on."""
    if arguments.supervisor != "direct":
        try:
            return begun(LabHost(laid_systemd(arguments, scratch)))
        except (FailedCommand, subprocess.SubprocessError, OSError) as error:
            if arguments.supervisor == "systemd":
                raise
            say(f"no systemd can be had here, so it is wcache supervise:\n{error}")
    return begun(DirectHost())


def driver_answers() -> bool:
    """Asked in a process of its own; makes the device's nodes, which the lab takes as they are."""
    program = (
        "import sys; from wcache.memory import driver; sys.exit(not driver.driver_available())"
    )
    return subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def begun(host: Host) -> Host:
    try:
        host.begin()
    except BaseException:
        host.close()
        raise
    return host


def laid_systemd(arguments: argparse.Namespace, scratch: Path) -> Path | None:
    """A folder with a systemd, for a machine without one."""
    if arguments.systemd_root:
        return Path(arguments.systemd_root)
    packages = arguments.deb or CHECKOUT / ".sd" / "deb"
    installed = Path("/usr/lib/systemd/systemd").exists() or Path("/lib/systemd/systemd").exists()
    if not arguments.deb and (installed or not packages.is_dir()):
        return None
    folder = scratch / "systemd"
    ran = subprocess.run([SCRIPT, "lay", packages, folder], capture_output=True, text=True,
                         timeout=120, check=False)  # fmt: skip
    if ran.returncode:
        raise FailedCommand(ran.stderr.strip())
    return folder


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/survival.sh", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", default="128MiB", help="of the random model")
    parser.add_argument("--model", type=Path, help="a checkpoint to use in its place")
    parser.add_argument("--supervisor", choices=("auto", "systemd", "direct"), default="auto")
    parser.add_argument("--systemd-root", type=Path, help="a folder with a systemd to boot")
    parser.add_argument("--deb", type=Path, help="packages of one; .sd/deb where none is installed")
    parser.add_argument("--limit", type=int, default=540, help="seconds for everything")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> int:
    arguments = parsed()
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        # So that it cleans up.
        signal.signal(number, lambda *_: sys.exit("survival: ended before it was done"))
    signal.alarm(arguments.limit)
    if arguments.device == "cuda" and not driver_answers():
        sys.exit("survival: no GPU can be used from here")
    with tempfile.TemporaryDirectory(prefix="wcsurv") as scratch:
        try:
            host = chosen_host(arguments, Path(scratch))
        except FailedCommand as error:
            sys.exit(f"survival: {error}")
        try:
            return survive(host, arguments)
        finally:
            host.close()


def survive(host: Host, arguments: argparse.Namespace) -> int:
    checkpoint = Checkpoint(host.models / "model", host.models.with_name("aside"))
    if arguments.model:
        checkpoint.take(arguments.model)
    else:
        checkpoint.make(parse_size(arguments.size))
    run = Run(host, checkpoint, arguments.device)
    try:
        run.go()
    except (FailedCommand, subprocess.SubprocessError, OSError) as error:
        run.claim(False, str(error))
    if run.not_shown:
        say(host.log())
    result = Result(supervisor=host.supervisor, device=arguments.device, rows=run.rows,
                    weight_bytes=run.weight_bytes, not_shown=run.not_shown)  # fmt: skip
    title = f"{size(run.weight_bytes)} of weights, {arguments.device}, kept by {host.supervisor}"
    if not arguments.json:
        print(f"\n{title}\n", flush=True)
    Output(as_json=arguments.json).data(result, table(run.rows))
    if run.rows and not arguments.json:
        print(NOTES, flush=True)
    for what in run.not_shown:
        say(f"NOT SHOWN: {what}")
    return 1 if run.not_shown else 0


if __name__ == "__main__":
    sys.exit(main())
