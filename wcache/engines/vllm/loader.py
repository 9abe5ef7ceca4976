"""The model loader behind ``--load-format wcache``: attaches, publishes, or falls back to disk."""

import contextlib
import logging
import time
from typing import Any

import torch
import vllm
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from wcache.client import Attachment
from wcache.engines.account import Account
from wcache.engines.orders import Orders
from wcache.engines.vllm import versions
from wcache.engines.vllm.build import build
from wcache.engines.vllm.disk import WatchedLoader, disk_config
from wcache.engines.vllm.fill import Claim, not_published, point_at, publish
from wcache.engines.vllm.obtain import attached, obtain, settled
from wcache.engines.vllm.refusals import check_features, check_is_target
from wcache.engines.vllm.wanted import Wanted, rank_of, wanted_by
from wcache.errors import UnsupportedQuantForIPCError, UsageError, WcacheError
from wcache.fingerprint import compare
from wcache.hints import note
from wcache.load.report import ProgressReport, failure_told
from wcache.units import size

# Below vLLM's own logger, whose handlers are the engine's log.
log = logging.getLogger("vllm.wcache")


class WcacheModelLoader(BaseModelLoader):  # type: ignore[misc]  # vllm has no types here
    """Takes a rank's finished weights from its daemon; what to do without is in the orders."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._orders = Orders.given()

    def download_model(self, model_config: Any) -> None:
        """What is attached to needs no download, and the fallback does its own."""

    def load_weights(self, *_: object, **__: object) -> None:
        """Raises :class:`UsageError`: new weights would have to be written over shared ones."""
        raise UsageError(
            "weights that are mapped for reading can not be reloaded in place",
            hint="restart the engine: it attaches to what its daemon then serves",
        )

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Bytes on the GPU that this rank will map; vLLM takes them off its memory budget."""
        try:
            wanted = wanted_by(vllm_config, self._orders)
            found = settled(wanted)
        except WcacheError as error:
            log.warning("no weights are counted as held elsewhere: %s", error.message)
            return 0
        serving = found.serving if found is not None else None
        if serving is None or compare(serving.fingerprint, wanted.fingerprint):
            return 0
        return serving.slab_bytes

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """The finished model, from the cache where it can be, with its outcome reported.

        Raises :class:`UsageError` for features that do not go with mapped weights,
        :class:`UnsupportedQuantForIPCError` for weights that no map carries whole,
        :class:`OutOfMemoryError` when the disk is the way out and the model would not fit beside
        what is resident, and what :func:`wcache.attach` raises where the orders forbid that way.
        """
        if told := versions.untried(str(vllm.__version__)):
            log.warning("wcache: %s", told)
        try:
            return self._loaded(vllm_config, model_config, prefix)
        except WcacheError as error:
            note(error, self._orders.instance)
            raise

    def _loaded(self, vllm_config: Any, model_config: Any, prefix: str) -> torch.nn.Module:
        check_is_target(vllm_config, model_config)
        check_features(vllm_config)
        load = _Load(self._orders, self.load_config, vllm_config, model_config, prefix)
        try:
            wanted = wanted_by(vllm_config, self._orders)
        except UnsupportedQuantForIPCError:
            raise
        except WcacheError as error:
            return load.from_disk(error, None)
        begun = time.perf_counter()
        try:
            found = obtain(wanted, model_config)
        except WcacheError as error:
            return load.from_disk(error, wanted)
        if isinstance(found, Claim):
            return load.publishing(found, wanted)
        return load.attached(found, wanted, begun)


class _Load:
    """One call of ``load_model``: its ways to a model, and what is told of each."""

    def __init__(
        self, orders: Orders, load_config: Any, vllm_config: Any, model_config: Any, prefix: str
    ) -> None:
        self._orders = orders
        self._load_config = load_config
        self._arguments = {
            "vllm_config": vllm_config, "model_config": model_config, "prefix": prefix,
        }  # fmt: skip
        self._rank = rank_of(vllm_config, orders)
        self._account = Account(orders, self._rank, log)
        self.told = self._account.told

    def attached(self, attachment: Attachment, wanted: Wanted, begun: float) -> torch.nn.Module:
        for step, seconds in attachment.seconds.items():
            self.told(step, seconds)
        try:
            model = build(attachment, **self._arguments, device=wanted.device, told=self.told)
        except BaseException:
            attachment.close()
            raise
        _keep(model, attachment)
        self._account.hit(attachment, time.perf_counter() - begun)
        return model

    def publishing(self, claimed: Claim, wanted: Wanted) -> torch.nn.Module:
        """Loads from disk as vLLM does, and hands over what came of it."""
        log.info("wcache: rank %s is empty: its weights are read from disk once", self._rank)
        with claimed.control as control:
            with failure_told(control):
                with contextlib.suppress(OSError):  # who has ended is met again when all is read
                    ProgressReport(control).begin("read", wanted.shard_bytes)
                begun = time.perf_counter()
                loader = WatchedLoader(self._load_config, wanted.device.type)
                model: torch.nn.Module = loader.load_model(**self._arguments)
                self.told("read", time.perf_counter() - begun)
            try:
                begun = time.perf_counter()
                with failure_told(control):
                    generation = publish(claimed, model, loader.extras(model), wanted)
                attachment = attached(wanted)
                point_at(model, attachment)
            except (WcacheError, OSError) as error:
                # The model is whole, and computes: only nobody else can use its weights.
                failed = not_published(error, self._rank)
                self._account.end("miss", failed.message)
                if self._orders.on_mismatch == "fail":
                    raise failed from error
                log.warning("wcache: rank %s: %s", self._rank, failed.message)
                return model
        _keep(model, attachment)
        self.told("publish", time.perf_counter() - begun)
        held = size(attachment.manifest.weight_bytes)
        reason = f"read from disk and published as generation {generation}, {held}"
        log.info("wcache: rank %s: %s", self._rank, reason)
        self._account.end("published", reason)
        return model

    def from_disk(self, why: WcacheError, wanted: Wanted | None) -> torch.nn.Module:
        """The fallback: vLLM's own loader, unless that is forbidden or there is no room."""
        room = (wanted.device, wanted.shard_bytes) if wanted is not None else None
        self._account.missed(why, may_read=self._orders.on_mismatch == "fallback", room=room)
        begun = time.perf_counter()
        loader = DefaultModelLoader(disk_config(self._load_config))
        model: torch.nn.Module = loader.load_model(**self._arguments)
        self.told("read", time.perf_counter() - begun)
        return model


def _keep(model: torch.nn.Module, attachment: Attachment) -> None:
    """The lease lasts as long as the model does."""
    loose: Any = model
    loose.wcache_attachment = attachment
