"""A script's model from its checkpoint on disk, where nothing cached fits."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wcache.checkpoint import Checkpoint
from wcache.client.views import views
from wcache.config import Config, LayoutSection, ModelSection
from wcache.engines.transformers.model import build, model_class
from wcache.engines.transformers.place import Place
from wcache.engines.transformers.source import Source
from wcache.errors import CheckpointError, WcacheError
from wcache.fingerprint import Fingerprint
from wcache.hub import resolve_model
from wcache.load.job import described
from wcache.load.placement import plan
from wcache.load.read import read_plan
from wcache.manifest import Manifest, Storage
from wcache.memory import open_memory
from wcache.memory.slab import Access, slab_sizes
from wcache.paths import InstancePaths
from wcache.ranks import read_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    import transformers

_SLAB_BYTES = 1 << 30


class Disk:
    """A checkpoint, and what of it this process would read."""

    def __init__(self, checkpoint: Checkpoint, place: Place, tp: int, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._place = place
        self._tp = tp
        self.device = device
        # Those beside it read into the same memory, where that is the host's.
        readers = place.local_size if device.type == "cpu" else 1
        self.nbytes = checkpoint.total_bytes * readers // tp
        """About what is read into the memory of :attr:`device`, by all processes that do."""

    @classmethod
    def of(
        cls,
        model: str | Path | None,
        instance: str,
        place: Place,
        device: str | torch.device | None,
    ) -> "Disk":
        """The checkpoint of ``model``, or else of the instance's configuration.

        Raises :class:`WcacheError` when neither says which one, or it is not there.
        """
        try:
            config = read_config(InstancePaths.of(instance))
        except (WcacheError, OSError):
            config = None  # not there, or not for this user to read
        name = str(model) if model is not None else config.model.path if config else None
        if name is None:
            raise CheckpointError("no checkpoint is named: from_cache(model=…)")
        checkpoint = resolve_model(name, None).open()
        # Of several processes each has a shard, unless they are known to be replicas.
        tp = place.size if place.is_joint else 1
        if config is not None and config.layout.tp * config.layout.dp == place.size:
            tp = config.layout.tp
        return cls(checkpoint, place, tp, _device(device, place))

    def load(
        self, *, attn_implementation: str | None, overrides: dict[str, Any]
    ) -> "transformers.PreTrainedModel":
        """Raises :class:`CheckpointError` for a checkpoint that transformers can not load."""
        source = Source(str(self._checkpoint.path), None)
        if self._tp > 1:
            group = self._place.group(self._tp, self.device)
            weights = Shard(self._checkpoint, self._tp, group.rank, self.device)
            return build(
                weights, source, group=group, attn_implementation=attn_implementation,
                overrides=overrides,
            )  # fmt: skip
        config = source.config(dict(overrides))
        options = (
            {} if attn_implementation is None else {"attn_implementation": attn_implementation}
        )
        kind: Any = model_class(config)  # what transformers types only in part
        try:
            model = kind.from_pretrained(
                self._checkpoint.path, config=config, dtype="auto", local_files_only=True,
                trust_remote_code=False, use_safetensors=True, **options,
            )  # fmt: skip
        except (OSError, ValueError, RuntimeError) as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"transformers can not load the model: {line[:300]}") from None
        loaded: transformers.PreTrainedModel = model.to(self.device)
        return loaded


class Shard:
    """One rank's part of a checkpoint in memory of this process's own; see :class:`Weights`."""

    def __init__(self, checkpoint: Checkpoint, tp: int, tp_rank: int, device: torch.device) -> None:
        """Reads it, as a loader process of the rank would."""
        config = Config(model=ModelSection(path=str(checkpoint.path)), layout=LayoutSection(tp=tp))
        planned = plan(checkpoint, config, tp_rank)
        memory = open_memory("cuda" if device.type == "cuda" else "cpu", device_uuid=_uuid(device))
        sizes = slab_sizes(planned.total_bytes, _SLAB_BYTES, memory.granularity)
        slabs = [memory.create(nbytes) for nbytes in sizes]
        mapping = memory.map(slabs, Access.WRITE)
        for slab in slabs:
            slab.close()
        read_plan(checkpoint, planned, mapping, lambda _: None, digested=False)
        self.manifest = Manifest(
            id="disk",
            fingerprint=Fingerprint(
                model=str(checkpoint.path), architecture=checkpoint.config.architecture,
                tp_size=tp, tp_rank=tp_rank,
            ),
            slabs=tuple(slab.info for slab in slabs),
            storages=tuple(Storage(*span, "") for span in planned.spans),
            tensors=described(planned),
        )  # fmt: skip
        whole = mapping.tensor()
        self._range = range(mapping.address, mapping.address + mapping.nbytes)
        self.device = whole.device
        self.tensors: Mapping[str, torch.Tensor] = views(self.manifest, whole)
        mapping.close()  # it stays for as long as there are tensors over it

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() == 0 or tensor.data_ptr() in self._range


def _device(asked: str | torch.device | None, place: Place) -> torch.device:
    """Where the weights would be cached: on the GPU of this process, where there is one."""
    if asked is not None:
        return torch.device(asked)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", place.gpu)


def _uuid(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
