"""What transformers says of architectures, kept: asking it takes seconds of imports."""

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

import wcache
from wcache.checkpoint import Checkpoint
from wcache.checkpoint.document import read_document
from wcache.checkpoint.folder import CONFIG
from wcache.errors import CheckpointError
from wcache.kept import KeptFolder
from wcache.load.linears import Fp8Layers, fp8_layers
from wcache.load.parallel import ParallelPlan, read_parallel_plan
from wcache.load.release import released

SCHEME = 1
"""Changes when :class:`ParallelPlan` or :class:`Fp8Layers` do, or mean something else, between two
versions of wcache."""

_ELSEWHERE = "configuration_files"
"""The key of config.json by which transformers reads another file of the folder in its place."""

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

    An answer counts for the same ``config.json``, byte for byte, and the same releases of
    transformers and wcache, and is not kept where transformers reads more than that file. Importing
    a model class took 6 s on a node with scikit-learn, SciPy and pandas installed, and ``wcache
    up`` and every rank's loader ask the same.
    """

    folder: Path | None = None
    keep: bool = True
    """Write what had to be asked. Not for a loader, whose sandbox has no place to write to."""
    asks: bool = True
    """Ask transformers for what is not kept; else that raises :class:`NotAskedError`."""
    tell: Callable[[str], None] | None = None
    """Is called with a line before transformers is asked."""
    _answers: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """All ranks of a command ask the same, also where nothing can be kept."""

    def parallel_plan(self, checkpoint: Checkpoint) -> ParallelPlan:
        """As :func:`wcache.load.parallel.read_parallel_plan`."""

        def ask() -> ParallelPlan:
            return self._asked(checkpoint, "how it is spread over ranks", read_parallel_plan)

        return self._answer(checkpoint, ParallelPlan, ask)

    def fp8_layers(self, checkpoint: Checkpoint) -> Fp8Layers:
        """As :func:`wcache.load.linears.fp8_layers`."""

        def ask() -> Fp8Layers:
            return self._asked(checkpoint, "which of its layers become FP8", fp8_layers)

        return self._answer(checkpoint, Fp8Layers, ask)

    def _answer(self, checkpoint: Checkpoint, kind: type[T], ask: Callable[[], T]) -> T:
        if self.folder is None:
            return ask()
        question = f"{kind.__name__} for {hashlib.sha256(checkpoint.config.data).hexdigest()}"
        if question not in self._answers:
            if _ELSEWHERE in checkpoint.config.raw:
                self._answers[question] = ask()
            else:
                self._answers[question] = self._kept(KeptFolder(self.folder), question, kind, ask)
        answer: T = self._answers[question]
        return answer

    def _kept(self, folder: KeptFolder, question: str, kind: type[T], ask: Callable[[], T]) -> T:
        version = released()
        if version is None:
            return ask()
        ours = f"{wcache.__version__}, {SCHEME}"
        about = f"wcache {ours}, transformers {version}: {question}"
        name = hashlib.sha256(about.encode()).hexdigest()[:32]
        if (known := _decoded(folder.read(name), about, kind)) is not None:
            return known
        found = ask()
        if self.keep and released() == version:  # and not upgraded in the seconds of its import
            # A config may have a plan of its own, with names that no file can have.
            with contextlib.suppress(UnicodeError):
                folder.write(name, _encoded(about, found))
        return found

    def _asked(self, checkpoint: Checkpoint, what: str, ask: Callable[[Checkpoint], T]) -> T:
        """The answer, which transformers gives for the file as it is by then.

        Raises :class:`CheckpointError` where that is another one than ``checkpoint`` was read with:
        imports take seconds, and a link to the current model may have been moved.
        """
        if not self.asks:
            raise NotAskedError
        if self.tell is not None:
            model = checkpoint.config.architecture or "a model of no architecture"
            self.tell(f"{model}: asking transformers {what}")
        found = ask(checkpoint)
        if read_document(checkpoint.path / CONFIG) != checkpoint.config.data:
            raise CheckpointError(
                f"{checkpoint.path / CONFIG} has changed while it was read",
                hint="when the folder is complete: wcache up",
            )
        return found


ASK = Architectures()
"""Asks transformers every time."""


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
