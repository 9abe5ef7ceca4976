"""What a reader is given: memory to read into, and a checkpoint of three files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import write_checkpoint
from tests.reading import many
from wcache.checkpoint import Checkpoint, open_checkpoint
from wcache.memory.host import HostMapping, HostMemory
from wcache.memory.slab import Access, Slab

MIB = 1 << 20


@pytest.fixture
def slab() -> Iterator[Slab]:
    made = HostMemory().create(4 * MIB)
    yield made
    made.close()


@pytest.fixture
def mapping(slab: Slab) -> HostMapping:
    return HostMemory().map([slab], Access.WRITE)


@pytest.fixture
def model(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_checkpoint(tmp_path / "m", many(), shards=3))
