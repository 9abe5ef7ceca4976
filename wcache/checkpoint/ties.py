"""Whether a language model's output head is its input embedding."""

import os
import re
from itertools import pairwise

from wcache.checkpoint.document import read_exactly
from wcache.checkpoint.folder import Checkpoint
from wcache.checkpoint.header import TensorEntry
from wcache.checkpoint.identity import open_unchanged

HEAD = "lm_head.weight"
_EMBEDDING = re.compile(
    r"(\w+\.){0,2}(embed_tokens|embed_in|wte|word_embeddings|tok_embeddings)\.weight"
)
_LANGUAGE_MODEL = ("ForCausalLM", "LMHeadModel")
_CHUNK_BYTES = 4 << 20


def tied_embedding(checkpoint: Checkpoint) -> str | None:
    """The name of the tensor that :data:`HEAD` is tied to; None when the two are apart.

    A language model has a head. Where the checkpoint has none it can only be the embedding, unless
    config.json says that they are not tied; a config that does not say follows its model's default,
    which is known to transformers alone. Where the checkpoint has both, they are tied if
    config.json says so *and* they are equal, as transformers decides it; that is the one case in
    which weights are read here.
    """
    config = checkpoint.config
    if not (config.architecture or "").endswith(_LANGUAGE_MODEL):
        return None
    if config.tie_word_embeddings is False:
        return None
    names = [
        name
        for name, entry in checkpoint.tensors.items()
        if _EMBEDDING.fullmatch(name) and len(entry.shape) == 2
    ]
    if len(names) != 1:
        return None
    head = checkpoint.tensors.get(HEAD)
    if head is None:
        return names[0]
    if config.tie_word_embeddings and _are_equal(checkpoint, checkpoint.tensors[names[0]], head):
        return names[0]
    return None


def _are_equal(checkpoint: Checkpoint, one: TensorEntry, other: TensorEntry) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    files = {file.name: file for file in checkpoint.files}
    first = second = -1
    try:
        first = open_unchanged(checkpoint, files[one.file])
        second = open_unchanged(checkpoint, files[other.file])
        edges = [*range(0, one.nbytes, _CHUNK_BYTES), one.nbytes]
        return all(
            read_exactly(first, stop - start, one.start + start, checkpoint.path / one.file)
            == read_exactly(second, stop - start, other.start + start, checkpoint.path / other.file)
            for start, stop in pairwise(edges)
        )
    finally:
        for fd in (first, second):
            if fd >= 0:
                os.close(fd)
