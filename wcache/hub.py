"""From what an operator calls a model to a folder on this machine: a path, or a hub id."""

import contextlib
import difflib
import itertools
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from wcache.checkpoint import Checkpoint, open_checkpoint
from wcache.checkpoint.document import unreadable
from wcache.errors import CheckpointError, UsageError, WcacheError
from wcache.streams import talk

# Weights and what is needed to use them. No pickles and no code: wcache would run neither, and
# whoever reads the folder after it should not have to wonder.
PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedModel:
    """Where a model lies, and how it came there."""

    path: Path
    hub_id: str | None = None
    revision: str | None = None
    """The commit for a hub id; for a path whatever the operator called it."""
    checkpoint: Checkpoint | None = field(default=None, compare=False, repr=False)
    """What lies there, when it had to be looked at to find out that it is whole."""

    def open(self) -> Checkpoint:
        """Raises :class:`CheckpointError`; headers that have been read are not read again."""
        return self.checkpoint or open_checkpoint(self.path)


A_MODEL = "a model is a folder, or a hub id such as org/name"
_MAX_NEIGHBOURS = 1000


def resolve_model(model: str, revision: str | None, *, download: bool = True) -> ResolvedModel:
    """The folder of ``model``, an existing directory or a hub id ``ORG/NAME``.

    The hub's local cache comes first: a revision that lies there is taken as it is, without a
    look at the network; without ``download`` it is all there is. Raises :class:`CheckpointError`
    for a path that is not there, :class:`UsageError` for a revision without a name, and
    :class:`WcacheError` for a hub id that can not be had.
    """
    if revision == "":
        raise UsageError("the revision is empty", hint="leave --revision out, or name a commit")
    path = Path(model).expanduser()
    try:
        is_folder, is_there = path.is_dir(), path.exists()
    except OSError as error:
        raise unreadable(path, error) from None
    if model and is_folder:
        return ResolvedModel(path=path.absolute(), revision=revision)
    if model and is_there:
        raise CheckpointError(
            f"{model} is not a folder", hint="a checkpoint is a folder with config.json in it"
        )
    if not is_hub_id(model):
        raise CheckpointError(
            f"no such checkpoint: {model or repr(model)}",
            hint=_meant(path) if model else A_MODEL,
        )
    try:
        import huggingface_hub
    except ImportError:
        raise WcacheError(
            f"{model} is no folder here, and hub ids need huggingface_hub",
            hint="pip install 'wcache[transformers]', or give the path of a folder",
        ) from None
    _ = huggingface_hub  # found; _snapshot imports what it needs
    cached = _cached(model, revision)
    if cached is None and not download:
        at = f" at revision {revision}" if revision else ""
        raise CheckpointError(
            f"{model}{at} is not in the hub's local cache", hint=f"hf download {model} gets it"
        )
    folder = cached.path if cached else _downloaded(model, revision)
    # The cache names a snapshot's folder by its commit.
    commit = folder.name if _COMMIT.fullmatch(folder.name) else revision
    return ResolvedModel(path=folder, hub_id=model, revision=commit, checkpoint=cached)


def _meant(path: Path) -> str:
    """A hint for a folder that is not there: one beside it of almost that name, or what is missing
    of the way to it."""
    whole = path.absolute()
    with contextlib.suppress(OSError):
        missing = next(one for one in (*reversed(whole.parents), whole) if not one.exists())
        with os.scandir(missing.parent) as found:
            near = [one.name for one in itertools.islice(found, _MAX_NEIGHBOURS) if one.is_dir()]
        for alike in difflib.get_close_matches(missing.name, near):
            other = missing.parent / alike / whole.relative_to(missing)
            # Whoever named it may drive our terminal by its name.
            if other.is_dir() and alike.isprintable():
                return f"did you mean {other}?"
        if missing != whole or not path.is_absolute():
            return f"there is no {missing}; {A_MODEL}"
    return A_MODEL


def is_hub_id(model: str) -> bool:
    """True for ``ORG/NAME``, whether the hub has it or not."""
    return _HUB_ID.fullmatch(model) is not None


def _cached(model: str, revision: str | None) -> Checkpoint | None:
    """The snapshot in the local cache, when it is whole.

    One that holds only config.json and a tokenizer is common, and so is one whose download was
    broken off: the hub is asked for the rest of both.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model, revision=revision, local_files_only=True, allow_patterns=list(PATTERNS)
        )
        return open_checkpoint(Path(found))
    except (LocalEntryNotFoundError, CheckpointError, ValueError):
        return None


def _downloaded(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is httpx's
        GatedRepoError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    talk(f"{model} is not in the hub's local cache: asking the hub")
    at = f" at revision {revision}" if revision else ""
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(PATTERNS)))
    except GatedRepoError:
        raise WcacheError(
            f"the hub does not give {model} to everybody",
            hint="accept its terms on the hub, then set HF_TOKEN or run hf auth login",
        ) from None
    except RepositoryNotFoundError:
        raise WcacheError(
            f"the hub has no {model}, or does not show it to you",
            hint="check the spelling; a private model needs HF_TOKEN",
        ) from None
    except RevisionNotFoundError:
        raise WcacheError(
            f"{model} has no revision {revision}", hint="a branch, a tag or a whole commit"
        ) from None
    except LocalEntryNotFoundError:
        raise WcacheError(
            f"{model}{at} is not in the local cache, and the hub can not be reached",
            hint=f"run hf download {model} where there is a network (HF_HUB_CACHE says where it"
            " goes), or give the path of a folder",
        ) from None
    except (OSError, ValueError, HTTPError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WcacheError(
            f"download of {model}{at} failed: {reason[:200]}",
            hint="run the same command again: what has come is kept",
        ) from None
