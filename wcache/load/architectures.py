"""What transformers says of architectures, kept: asking it takes seconds of imports."""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from wcache.checkpoint import Checkpoint
from wcache.checkpoint.folder import CONFIG
from wcache.kept import KeptFolder
from wcache.load.linears import Fp8Layers, fp8_layers
from wcache.load.parallel import ParallelPlan, read_parallel_plan

SCHEME = 1
"""Changes when :class:`ParallelPlan` or :class:`Fp8Layers` do, or mean something else."""

# Of PEP 440, without development releases (.dev) and local builds (+): those change as they are.
_RELEASE = re.compile(r"[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?")

T = TypeVar("T")


class NotAskedError(Exception):
    """Nothing is kept of an architecture, and transformers was not to be asked."""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the cache."""

    about: str
    value: msgspec.Raw
    digest: str
    """SHA-256 of ``about`` and ``value``. A damaged plan would cut weights wrongly."""


@dataclass(frozen=True, slots=True)
class Architectures:
    """A folder with one JSON file for each answer; without a folder every question is asked anew.

    An answer counts for the same ``config.json``, byte for byte, and the same released version of
    transformers. Importing a model class took 6 s on a node with scikit-learn, SciPy and pandas
    installed, and ``wcache up`` and every rank's loader ask the same.
    """

    folder: Path | None = None
    keep: bool = True
    """Write what had to be asked. Not for a loader, whose sandbox has no place to write to."""
    tell: Callable[[str], None] | None = None
    """Is called with a line before transformers is asked."""
    asks: bool = True
    """Ask transformers for what is not kept; else that raises :class:`NotAskedError`."""

    def parallel_plan(self, checkpoint: Checkpoint) -> ParallelPlan:
        """As :func:`wcache.load.parallel.read_parallel_plan`."""
        what = "how it is spread over ranks"
        return self._answer(checkpoint, what, ParallelPlan, read_parallel_plan)

    def fp8_layers(self, checkpoint: Checkpoint) -> Fp8Layers:
        """As :func:`wcache.load.linears.fp8_layers`."""
        what = "which of its layers become FP8"
        return self._answer(checkpoint, what, Fp8Layers, fp8_layers)

    def _answer(
        self, checkpoint: Checkpoint, what: str, kind: type[T], ask: Callable[[Checkpoint], T]
    ) -> T:
        version = released()
        if self.folder is None or version is None:
            return self._asked(checkpoint, ask)
        config = hashlib.sha256(checkpoint.config.data).hexdigest()
        about = f"{SCHEME} {kind.__name__} of transformers {version} for {config}"
        name = hashlib.sha256(about.encode()).hexdigest()[:32]
        folder = KeptFolder(self.folder)
        if (known := _decoded(folder.read(name), about, kind)) is not None:
            return known
        if self.tell is not None and self.asks:
            model = checkpoint.config.architecture or "a model of no architecture"
            self.tell(f"{model}: asking transformers {version} {what}")
        found = self._asked(checkpoint, ask)
        if self.keep and _is_still(checkpoint, version):
            folder.write(name, _encoded(about, found))
        return found

    def _asked(self, checkpoint: Checkpoint, ask: Callable[[Checkpoint], T]) -> T:
        if not self.asks:
            raise NotAskedError
        return ask(checkpoint)


ASK = Architectures()
"""Asks transformers every time."""


def released() -> str | None:
    """The version of transformers that an import takes; None where there is none, or where its
    number does not say what it is: a working copy, or a build of one."""
    try:
        found = importlib.metadata.distribution("transformers")
        spec = importlib.util.find_spec("transformers")
    except (importlib.metadata.PackageNotFoundError, ValueError):  # a module without a spec
        return None
    # Written by installers for what was not found by its version: packaging's "direct URL origin".
    if found.read_text("direct_url.json") or not _RELEASE.fullmatch(found.version or ""):
        return None
    # Another one may go before it on the path, by PYTHONPATH or in the folder of a script.
    own = os.path.realpath(str(found.locate_file("transformers/__init__.py")))
    taken = spec.origin if spec is not None else None
    return found.version if taken and os.path.realpath(taken) == own else None


def _is_still(checkpoint: Checkpoint, version: str) -> bool:
    """Whether transformers was asked what it was meant to be asked: it reads config.json itself,
    and both that and transformers may have been exchanged in the seconds of its import."""
    with contextlib.suppress(OSError):
        config = (checkpoint.path / CONFIG).read_bytes()
        return config == checkpoint.config.data and released() == version
    return False


def _encoded(about: str, value: object) -> bytes:
    raw = msgspec.json.encode(value)
    return msgspec.json.encode(Entry(about, msgspec.Raw(raw), _digest(about, raw)))


def _decoded(data: bytes | None, about: str, kind: type[T]) -> T | None:
    if data is None:
        return None
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        entry = msgspec.json.decode(data, type=Entry)
        if entry.about == about and entry.digest == _digest(about, bytes(entry.value)):
            return msgspec.json.decode(entry.value, type=kind)
    return None


def _digest(about: str, raw: bytes) -> str:
    return hashlib.sha256(about.encode() + b"\n" + raw).hexdigest()
