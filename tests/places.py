"""Folders of a test's own in place of /run/wcache, /etc/wcache and /var/lib/wcache."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from wcache.config import (
    AccessSection,
    Config,
    LayoutSection,
    MemorySection,
    ModelSection,
    save_config,
)
from wcache.paths import InstancePaths, RankPaths


@dataclass(frozen=True)
class Places:
    root: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            "WCACHE_RUN_DIR": str(self.root / "run"),
            "WCACHE_CONFIG_DIR": str(self.root / "etc"),
            "WCACHE_STATE_DIR": str(self.root / "state"),
        }

    def instance(self, name: str = "") -> InstancePaths:
        return InstancePaths(name, self.root / "run", self.root / "etc", self.root / "state")

    def rank(self, rank: int = 0, instance: str = "") -> RankPaths:
        return self.instance(instance).rank(rank)

    def write_config(self, config: Config, instance: str = "") -> Path:
        path = self.instance(instance).config_file
        save_config(config, path)
        return path

    def remove_run(self) -> None:
        remove_at_once(self.root / "run")


def remove_at_once(folder: Path) -> None:
    """Removes a folder in which running processes make their files again meanwhile.

    They do so within milliseconds, so that a removal file by file finds folders not empty.
    """
    aside = folder.with_name(f"{folder.name}.removed")
    folder.rename(aside)
    shutil.rmtree(aside)


def publish_config(
    *, layout: LayoutSection | None = None, access: AccessSection | None = None
) -> Config:
    """A configuration whose weights an engine publishes: no checkpoint is needed."""
    return Config(
        model=ModelSection(path="test-model", loader="publish"),
        memory=MemorySection(slab_bytes=2 << 20),
        layout=layout or LayoutSection(),
        access=access or AccessSection(),
    )
