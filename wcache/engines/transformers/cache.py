"""``from_cache``: the one line by which a script takes its model from the cache, or from disk."""

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from wcache.checkpoint import identify, open_checkpoint
from wcache.client import Attachment, attach
from wcache.difference import Difference
from wcache.engines.account import Account
from wcache.engines.orders import INSTANCE, Orders, is_ordered, report
from wcache.engines.transformers.disk import Disk
from wcache.engines.transformers.model import build, check_device, check_is_whole, keep
from wcache.engines.transformers.place import Place, leave
from wcache.engines.transformers.source import Source
from wcache.errors import MismatchError, UsageError, WcacheError
from wcache.fingerprint import Fingerprint
from wcache.hints import note
from wcache.hub import is_hub_id, resolve_model
from wcache.paths import RankId, check_instance_name

if TYPE_CHECKING:
    import transformers

log = logging.getLogger("wcache.engines.transformers")


def from_cache(
    model: str | Path | None = None,
    *,
    config: str | Path | None = None,
    rank: int | None = None,
    instance: str | None = None,
    wanted: Fingerprint | None = None,
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    wait_s: float = 0.0,
    fallback: bool | None = None,
    **config_overrides: Any,
) -> "transformers.PreTrainedModel":
    """A model in eval mode that computes with the weights of a rank, mapped and not copied.

    ``model``, a folder or a hub id, is the checkpoint whose weights are wanted: others are a
    mismatch. Left out, whatever is cached is taken. ``config`` is where the configuration is read
    when that is neither ``model`` nor the checkpoint that the weights were loaded from.
    ``config_overrides`` replace values of it, as in ``from_pretrained``. ``rank``, ``instance``,
    ``wanted`` and ``wait_s`` are those of :func:`wcache.attach`. ``device`` says where the weights
    are expected to lie. The dtype is that of the cached weights, and code of the checkpoint's is
    never run. Where they are FP8 the model has transformers' FP8 linear layers, which compute on a
    GPU and nowhere else.

    Under torchrun every process must call this: it takes the rank of its RANK and, where that is a
    shard of a model, computes in step with the others. torch.distributed is set up if the script
    has not done so. Such a model is for inference; sampling needs the same seed in all processes.

    ``fallback`` says whether the disk is read when nothing cached fits and there is room for it,
    by ``from_pretrained`` or, in several processes, for each its shard. Left out, it is as
    ``wcache run`` has ordered, and no where nobody has.

    The attachment is ``model.wcache_attachment``, None for a model from disk; closing it ends the
    lease. The parameters must not be written to. Raises what :func:`wcache.attach` raises,
    :class:`MismatchError` also when the processes are not the layout of what is cached,
    :class:`wcache.errors.CheckpointError` for a configuration that is not there or not known to
    transformers, :class:`wcache.errors.OutOfMemoryError` when the disk can not be read for want of
    memory, and :class:`WcacheError` when the cached tensors are not those of the model.
    """
    try:
        return _from_cache(
            model, config, rank, instance, wanted, wait_s, fallback, device=device,
            options={"attn_implementation": attn_implementation, "overrides": config_overrides},
        )  # fmt: skip
    except WcacheError as error:
        note(error, os.environ.get(INSTANCE, "") if instance is None else instance)
        raise


def _from_cache(
    model: str | Path | None,
    config: str | Path | None,
    rank: int | None,
    instance: str | None,
    wanted: Fingerprint | None,
    wait_s: float,
    fallback: bool | None,
    *,
    device: str | torch.device | None,
    options: dict[str, Any],
) -> "transformers.PreTrainedModel":
    orders = Orders.given()
    place = Place.here(rank)
    name = orders.instance if instance is None else instance
    rank_id = RankId(check_instance_name(name) if name else "", place.cached_rank)
    report(orders, "imports", rank=rank_id.rank)
    if fallback is None:
        fallback = is_ordered() and orders.on_mismatch == "fallback"
    account = Account(orders, rank_id, log)
    start = _Start(account=account, place=place, rank_id=rank_id, device=device, options=options)
    try:
        begun = start.join()
        found = start.attached(model, wanted, wait_s)
        if isinstance(found, Attachment):
            return start.bound(found, config if config is not None else model, begun)
        return start.from_disk(found, model, may_read=fallback)
    except BaseException:
        start.leave()
        raise


_FUSING = ("vllm", "sglang")
"""Engines whose finished weights have other names and shapes than the checkpoint's."""


def _asked(model: str | Path | None, wanted: Fingerprint | None) -> Fingerprint | None:
    """``wanted``, and what tells the weights of ``model`` from all others.

    A hub id that is not in the local cache goes by its name: nothing is downloaded for weights
    that are cached. Raises :class:`wcache.errors.CheckpointError` for a model that is not there.
    """
    if model is None:
        return wanted
    named = wanted or Fingerprint()
    try:
        folder = resolve_model(str(model), None, download=False).path
    except WcacheError:
        if not is_hub_id(str(model)):
            raise
        return msgspec.structs.replace(named, model=str(model))
    content = identify(open_checkpoint(folder)).digest
    return msgspec.structs.replace(named, content=content)


def _check_names(held: Fingerprint, rank: RankId) -> None:
    """Raises :class:`MismatchError` for tensors that another engine has fused and renamed."""
    if held.engine not in _FUSING:
        return
    raise MismatchError(
        f"rank {rank} holds tensors as {held.engine} fuses and lays them out, which transformers"
        " does not take",
        differences=(Difference("engine", held.engine, "transformers"),),
        hint="wcache up --instance NAME --model … has those of the checkpoint beside them",
    )


class _Start:
    """One call of :func:`from_cache`."""

    def __init__(
        self,
        *,
        account: Account,
        place: Place,
        rank_id: RankId,
        device: str | torch.device | None,
        options: dict[str, Any],
    ) -> None:
        self._account = account
        self._place = place
        self._rank_id = rank_id
        self._device = device
        self._options = options
        self._has_joined = False

    def join(self) -> float:
        """Finds the other processes; returns when that was done."""
        begun = time.perf_counter()
        if not self._place.is_joint:
            return begun
        self._has_joined = self._place.join()
        ready = time.perf_counter()
        self._account.told("distributed", ready - begun)
        return ready

    def leave(self) -> None:
        """Leaves no process group behind that this call has set up."""
        if self._has_joined:
            leave()

    def attached(
        self, model: str | Path | None, wanted: Fingerprint | None, wait_s: float
    ) -> Attachment | WcacheError:
        """An attachment, or why this process or one of its neighbours has none."""
        attachment, problem = None, None
        try:
            attachment = self._attach(_asked(model, wanted), wait_s)
        except UsageError:
            raise  # a mistake in the script, for all of its processes
        except WcacheError as error:
            problem = error
        held = attachment.fingerprint if attachment is not None else None
        problem = self._place.agree(problem, held)
        if attachment is None or problem is not None:
            if attachment is not None:
                attachment.close()
            assert problem is not None
            return problem
        for step, seconds in attachment.seconds.items():
            self._account.told(step, seconds)
        return attachment

    def _attach(self, wanted: Fingerprint | None, wait_s: float) -> Attachment:
        try:
            attachment = attach(
                rank=self._rank_id.rank, instance=self._rank_id.instance, wanted=wanted,
                wait_s=wait_s,
            )  # fmt: skip
        except MismatchError as error:
            if ("content", "unknown") in ((one.field, one.cached) for one in error.differences):
                error.hint = (
                    "a module was published, which tells of no checkpoint: from_cache(config=…)"
                    " takes it, and reads the configuration there"
                )
            raise
        try:
            held = attachment.fingerprint
            _check_names(held, self._rank_id)
            check_is_whole(held, held.tp_size or 1)
            self._place.check(held)
        except BaseException:
            attachment.close()
            raise
        return attachment

    def bound(
        self, attachment: Attachment, config: str | Path | None, begun: float
    ) -> "transformers.PreTrainedModel":
        fingerprint = attachment.fingerprint
        try:
            check_device(attachment.device, self._device)
            group = self._place.group(fingerprint.tp_size or 1, attachment.device)
            source = Source.of(config, fingerprint)
            model = build(attachment, source, group=group, told=self._account.told, **self._options)
        except BaseException:
            attachment.close()
            raise
        keep(model, attachment)
        self._account.hit(attachment, time.perf_counter() - begun)
        return model

    def from_disk(
        self, why: WcacheError, model: str | Path | None, *, may_read: bool
    ) -> "transformers.PreTrainedModel":
        """The fallback, where it is allowed and it is known what to read."""
        if self._place.size > 1 and not self._place.is_joint:
            may_read = False  # only together could they know that all of them do
        disk = None
        if may_read:
            try:
                disk = Disk.of(model, self._rank_id.instance, self._place, self._device)
            except WcacheError as error:
                log.warning("wcache: nothing can be read instead: %s", error.message)
        room = (disk.device, disk.nbytes) if disk is not None else None
        problem = None
        try:
            self._account.missed(why, may_read=disk is not None, room=room)
        except WcacheError as error:
            problem = error
        # Also so that none looks for room when others have begun to take it.
        if (problem := self._place.agree(problem, task="read the disk")) is not None:
            raise problem
        assert disk is not None
        begun = time.perf_counter()
        found = disk.load(**self._options)
        keep(found, None)
        self._account.told("read", time.perf_counter() - begun)
        return found
