"""Whole commands, and what they print compared with a file: stdout, stderr and the exit code."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.places import Places

SNAPSHOTS = Path(__file__).parent / "snapshots"
UPDATE = "WCACHE_UPDATE_SNAPSHOTS"

# What differs from run to run, by what stands in its place.
_FILTERS = [
    (re.compile(r"\bpid \d+"), "pid <PID>"),
    (re.compile(r"sha256:[0-9a-f]{12,64}"), "sha256:<DIGEST>"),
    (re.compile(r"\b\d+(\.\d+)? (s|min|h|d)\b"), "<TIME>"),
    (re.compile(r"(?<= )\d{3,7}(?=  +\d+  +\d+/\d+)"), "<PID>"),
    # Column widths follow from what was replaced.
    (re.compile(r"(?<=\S) {3,}"), "  "),
    (re.compile(r"(?m)^(\d+) +"), r"\1  "),
]


@dataclass(frozen=True)
class Done:
    """One call of ``wcache`` and how it ended."""

    arguments: tuple[str, ...]
    stdout: str
    stderr: str
    code: int

    def text(self, root: Path) -> str:
        """All of it, with everything replaced that is not the same in the next run."""
        command = " ".join(("wcache", *self.arguments))
        whole = f"$ {command}\n--- stdout\n{self.stdout}--- stderr\n{self.stderr}"
        whole = f"{whole}--- exit {self.code}\n".replace(str(root), "<ROOT>")
        for pattern, replacement in _FILTERS:
            whole = pattern.sub(replacement, whole)
        return whole


def environment(places: Places, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """No terminal, no colours, no network, folders of the test's own."""
    kept = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    fixed = {
        "COLUMNS": "100",
        "TERM": "dumb",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(places.root / "hub"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    return {**kept, **fixed, **places.environment, **(extra or {})}


def wcache(places: Places, *arguments: str, extra: Mapping[str, str] | None = None) -> Done:
    """Runs ``wcache`` to its end."""
    ran = subprocess.run(
        [sys.executable, "-m", "wcache", *arguments],
        env=environment(places, extra),
        cwd=places.root,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return Done(arguments, ran.stdout, ran.stderr, ran.returncode)


def check(done: Done, name: str, root: Path) -> None:
    """Compares with ``snapshots/NAME.txt``; WCACHE_UPDATE_SNAPSHOTS=1 writes it instead."""
    file = SNAPSHOTS / f"{name}.txt"
    text = done.text(root)
    if os.environ.get(UPDATE):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return
    assert file.exists(), f"no snapshot {file.name}: run again with {UPDATE}=1 and read it"
    assert text == file.read_text()
