"""The checkpoint of the survival run: made, moved out of everybody's reach, and watched there."""

import ctypes
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

from wcache.units import GIB

HERE = Path(__file__).parent
# inotify(7).
_ACCESS, _OPEN = 0x1, 0x20
_HEADER = struct.Struct("iIII")


class Checkpoint:
    """A folder whose weights can be moved away and put back.

    ``opened`` counts who has opened or read them, wherever they lay, since :meth:`watch`.
    """

    def __init__(self, folder: Path, aside: Path) -> None:
        self.folder = folder
        self.nbytes = 0
        self._aside = aside
        self._watch = -1
        self._opened = 0

    @property
    def weights(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))

    def make(self, nbytes: int) -> None:
        """Random weights of about ``nbytes``."""
        # In a process of its own, which takes the GPU's memory that it used along when it ends.
        script = str(HERE / "random_qwen3.py")
        subprocess.run([sys.executable, script, str(self.folder), *map(str, shape(nbytes))],
                       check=True, timeout=600)  # fmt: skip
        self._count()

    def take(self, source: Path) -> None:
        """A copy: a link would have whoever else reads the same file be counted."""
        self.folder.mkdir(parents=True)
        for path in sorted(source.iterdir()):
            if path.is_file():
                shutil.copyfile(path, self.folder / path.name)
        self._count()

    def watch(self) -> None:
        """Begins to count; whatever was counted before is forgotten."""
        self.close()
        libc = ctypes.CDLL(None, use_errno=True)
        self._watch = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        for path in (*self.weights, *self._aside.glob("*.safetensors")):
            if libc.inotify_add_watch(self._watch, os.fsencode(path), _ACCESS | _OPEN) < 0:
                raise OSError(ctypes.get_errno(), f"can not be watched: {path}")
        self._opened = 0

    @property
    def opened(self) -> int:
        """Openings and reads; several of the same kind in a row may be one."""
        try:
            data = os.read(self._watch, 1 << 20)
        except BlockingIOError:
            return self._opened
        place = 0
        while place < len(data):
            *_, length = _HEADER.unpack_from(data, place)
            place += _HEADER.size + length
            self._opened += 1
        return self._opened

    def move_away(self) -> None:
        self._aside.mkdir()
        for path in self.weights:
            path.rename(self._aside / path.name)

    def put_back(self) -> None:
        for path in self._aside.glob("*.safetensors"):
            path.rename(self.folder / path.name)

    def _count(self) -> None:
        self.nbytes = sum(path.stat().st_size for path in self.weights)

    def close(self) -> None:
        if self._watch >= 0:
            os.close(self._watch)
        self._watch = -1


def shape(nbytes: int) -> tuple[int, int]:
    """Layers and width with which scripts/random_qwen3.py writes about ``nbytes``."""
    # Bytes of both embeddings, and of a layer.
    hidden, embeddings, layer = (
        (4096, 2_489_319_424, 385_892_864) if nbytes >= 4 * GIB else (512, 16_777_216, 6_818_304)
    )
    return max(1, round((nbytes - embeddings) / layer)), hidden
