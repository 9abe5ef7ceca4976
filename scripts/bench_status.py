"""Measures the wall time of ``wcache status`` for 8 ranks that are up, beside ``import typer``.

    python scripts/bench_status.py [--systemd] [RUNS]

The ranks are of a checkpoint and an instance of the benchmark's own, on the CPU: under wcache's
own supervisor, or with --systemd in the tests' throw-away systemd, where status asks systemctl too.
Each run times whole processes: an interpreter that does nothing, one that imports typer, and the
status, one after the other, so that a busy machine is busy for all of them; the processor time that
each took tells how busy that was.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

RANKS = 8
Times = dict[str, list[tuple[float, float]]]
"""Seconds of wall and of processor time of each run, by program."""
STATUS, BASE = "wcache status", "import typer"
_TIMEOUT_S = 300
# Run where the ranks are, by the interpreter that is measured.
_MEASURE = f"""
import json, resource, subprocess, sys, time
def used():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
programs = {{
    "interpreter": [sys.executable, "-c", "pass"],
    {BASE!r}: [sys.executable, "-c", "import typer"],
    {STATUS!r}: [sys.executable, "-P", "-m", "wcache", "status"],
}}
times = {{name: [] for name in programs}}
for run in range(int(sys.argv[1]) + 1):
    for name, command in programs.items():
        before, began = used(), time.perf_counter()
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
        taken = time.perf_counter() - began
        if done.returncode:
            sys.exit(f"{{name}}: exit {{done.returncode}}: {{done.stderr.decode()}}")
        if run:  # the first reads the files from disk
            times[name].append((taken, used() - before))
print(json.dumps(times))
"""


def main(runs: int, *, systemd: bool) -> None:
    times = (in_systemd if systemd else under_own_supervisor)(runs)
    base = statistics.median(wall for wall, _ in times[BASE])
    print(f"{RANKS} ranks under {'systemd' if systemd else 'wcache supervise'}, {runs} runs")
    print(f"{'':16}{'median':>9}{'least':>9}{'most':>9}{'ratio':>7}{'processor':>11}")
    for name, taken in times.items():
        walls = [wall for wall, _ in taken]
        median = statistics.median(walls)
        numbers = "".join(f"{one * 1e3:6.0f} ms" for one in (median, min(walls), max(walls)))
        cpu = statistics.median(used for _, used in taken)
        print(f"{name:16}{numbers}{median / base:7.2f}{cpu * 1e3:8.0f} ms")


def under_own_supervisor(runs: int) -> Times:
    root = Path(tempfile.mkdtemp(prefix="wcache-bench-"))
    os.environ.update(
        WCACHE_RUN_DIR=str(root / "run"),
        WCACHE_CONFIG_DIR=str(root / "etc"),
        WCACHE_STATE_DIR=str(root / "state"),
    )
    try:
        python("-P", "-m", "wcache", *up(write_checkpoint(root / "model")))
        return parsed(python("-c", _MEASURE, str(runs)))
    finally:
        python("-P", "-m", "wcache", "down", "--force")
        shutil.rmtree(root, ignore_errors=True)


def in_systemd(runs: int) -> Times:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.systemd.lab import MODELS, PYTHON, SOURCE, Lab

    lab = Lab()
    try:
        write_checkpoint(lab.models / "model")
        lab.up()
        lab.install()
        lab.wcache(*up(Path(MODELS, "model")))
        measure = ("env", f"PYTHONPATH={SOURCE}", PYTHON, "-c", _MEASURE, str(runs))
        return parsed(lab.run(*measure).stdout)
    finally:
        lab.close()


def up(model: Path) -> Sequence[str]:
    return ("up", "--model", str(model), "--dp", str(RANKS), "--device", "cpu",
            "--slab-bytes", "2MiB", "--quiet")  # fmt: skip


def write_checkpoint(folder: Path) -> Path:
    """One tensor: how much a rank holds does not matter to who asks it."""
    nbytes = 1 << 20
    header = json.dumps({"w": {"dtype": "BF16", "shape": [nbytes // 2],
                               "data_offsets": [0, nbytes]}}).encode()  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["None"], "model_type": "none"}')
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + bytes(nbytes))
    return folder


def python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        timeout=_TIMEOUT_S, check=True,
    )  # fmt: skip
    return done.stdout


def parsed(text: str) -> Times:
    found: Times = json.loads(text)
    return found


if __name__ == "__main__":
    words = sys.argv[1:]
    numbers = [word for word in words if word.isdigit() and int(word)]
    if len(numbers) > 1 or set(words) - {*numbers, "--systemd"}:
        sys.exit(__doc__)
    main(int(numbers[0]) if numbers else 20, systemd="--systemd" in words)
