"""What an engine holds of a rank: its weights as tensors over the map, and the lease on them."""

import weakref
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING

from wcache.client.lease import Lease
from wcache.fingerprint import Fingerprint
from wcache.manifest import Manifest
from wcache.memory.slab import Mapping as MappedSlabs
from wcache.paths import RankId

if TYPE_CHECKING:
    import torch


class Attachment:
    """Weights that are mapped into this process, and leased; made by :func:`wcache.attach`.

    Its end, by :meth:`close`, by leaving a with-statement or by the garbage collector, ends the
    lease and closes the descriptors that were kept for a daemon that loses them. The memory stays
    mapped for as long as a tensor over it is left. A forked child may read the tensors of the
    host's memory, but the lease stays its parent's.
    """

    def __init__(
        self,
        *,
        rank_id: RankId,
        generation: int,
        manifest: Manifest,
        mapping: MappedSlabs,
        lease: Callable[[], Lease],
    ) -> None:
        """Takes ownership of ``mapping``; ``lease`` is called once all else has succeeded."""
        from wcache.client.views import views

        self.rank_id = rank_id
        self.generation = generation
        self.manifest = manifest
        self.seconds: Mapping[str, float] = {}
        """What attaching took: ``fetch``, from the call to the descriptors, and ``map``."""
        self._range = range(mapping.address, mapping.address + mapping.nbytes)
        whole = mapping.tensor()
        self.device: torch.device = whole.device
        self._tensors: Mapping[str, torch.Tensor] | None
        self._tensors = MappingProxyType(views(manifest, whole))
        self._mapping = mapping
        self._lease = lease()
        weakref.finalize(self, self._lease.release)

    @property
    def fingerprint(self) -> Fingerprint:
        return self.manifest.fingerprint

    @property
    def tensors(self) -> "Mapping[str, torch.Tensor]":
        """Every tensor by its dotted name, as a view of the map; tied names give one object.

        They must not be written to: host memory that is mapped for reading ends the process with
        SIGSEGV, a GPU's with an illegal access.
        """
        if self._tensors is None:
            raise ValueError("the attachment is closed")
        return self._tensors

    @property
    def lease_state(self) -> str:
        """``held``; ``renewing`` while the daemon is away; ``lost: `` and the reason."""
        return self._lease.state

    def holds(self, tensor: "torch.Tensor") -> bool:
        """True when ``tensor`` lies in the map; an empty one lies anywhere."""
        return tensor.numel() == 0 or tensor.data_ptr() in self._range

    def bind(
        self,
        module: "torch.nn.Module",
        *,
        allow_missing: Callable[[str], bool] | Collection[str] = (),
    ) -> None:
        """Points ``module``, built on the meta device, at the map: :func:`wcache.client.bind`."""
        from wcache.client.bind import bind

        bind(module, self.manifest, self.tensors, allow_missing=allow_missing)

    def close(self) -> None:
        """Ends the lease and drops the references to the map; safe to call twice.

        The memory is unmapped when the last tensor over it is gone, so a bound module goes on
        working; but without a lease the daemon may free the generation, and then this process is
        what keeps the memory.
        """
        self._lease.close()
        self._tensors = None
        self._mapping.close()

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<Attachment of rank {self.rank_id}, generation {self.generation},"
            f" {len(self.manifest.tensors)} tensors, lease {self.lease_state}>"
        )
