"""The loader process of ``loader = "vllm"``: vLLM's own loading for one rank, without its group.

Loading a dense model's shard needs to know its place in the group, and nothing of the others, so a
stand-in takes the group's place: torch's ``fake`` backend, whose operations return at once. What it
gave was the same, bit for bit, as a rank of a real group (two ranks, on the CPU). Experts that are
spread over ranks are refused, because nothing has shown them yet: the first engine publishes those.
"""

import contextlib
import dataclasses
import importlib.util
import logging
import os
import tempfile
import time
from typing import Any

import torch

from wcache.checkpoint import open_checkpoint
from wcache.config import Config
from wcache.engines.orders import Orders
from wcache.engines.vllm import versions
from wcache.errors import CheckpointError, UsageError, WcacheError
from wcache.load.publish import rank_memory
from wcache.load.report import ProgressReport
from wcache.paths import RankId
from wcache.protocol.control import Control
from wcache.protocol.messages import LoadOrder

log = logging.getLogger(__name__)

_PUBLISH = "wcache up --model … --loader publish has the first engine fill the rank"


def load(control: Control, order: LoadOrder, rank_id: RankId) -> int:
    """Has vLLM load this rank and publishes it; returns the generation's number.

    Raises :class:`WcacheError` when vLLM is not installed beside wcache or fails to load, and
    :class:`UsageError` for a layout that can not be loaded alone.
    """
    config, rank = order.config, rank_id.rank
    check_layout(config)
    if importlib.util.find_spec("vllm") is None:
        raise WcacheError(
            "vllm is not installed where wcache's loader runs",
            hint=f"install wcache in vllm's environment, or: {_PUBLISH}",
        )
    progress = ProgressReport(control)
    progress.begin("plan", 0)
    _prepare_environment()
    import vllm

    versions.check(str(vllm.__version__))
    from wcache.engines.vllm.fill import Claim, publish

    begun = time.monotonic()
    memory = rank_memory(config, rank)
    device = torch.device(memory.device)
    engine_config = _engine_config(config, device)
    with tempfile.TemporaryDirectory(prefix="wcache-vllm-") as folder:
        _join_group(engine_config, config, rank, device, folder)
        model, extras, wanted = _loaded(engine_config, config, rank_id, progress, device)
        generation = publish(Claim(control, order), model, extras, wanted)
    log.info("published generation %d in %.1f s", generation, time.monotonic() - begun)
    return generation


def check_layout(config: Config) -> None:
    """Raises :class:`UsageError` for what one rank can not load without the others."""
    layout = config.layout
    if layout.ep > 1:
        raise UsageError("vllm's experts can not be loaded by one rank alone", hint=_PUBLISH)


def _prepare_environment() -> None:
    # Before vllm is imported. A loader's sandbox has no home; what vllm keeps there is for engines.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CACHE_ROOT", tempfile.gettempdir() + "/wcache-vllm-cache")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _engine_config(config: Config, device: torch.device) -> Any:
    """vLLM's configuration for this model and layout, as an engine without further options has."""
    from vllm.engine.arg_utils import EngineArgs

    model, layout = config.model, config.layout
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        made = EngineArgs(
            model=model.path,
            dtype=model.dtype,
            tensor_parallel_size=layout.tp,
            pipeline_parallel_size=layout.pp,
            enforce_eager=True,
        ).create_engine_config()
    except (ValueError, OSError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"vllm takes no such model: {line[:300]}") from None
    made.device_config.device = device
    return made


def _join_group(
    engine_config: Any, config: Config, rank: int, device: torch.device, folder: str
) -> None:
    """Makes this process that rank of a group in which nobody else is."""
    import vllm.distributed.parallel_state as state
    from vllm.config import set_current_vllm_config

    place, size = config.ranks.coordinates(rank), config.layout.tp * config.layout.pp
    own = place.pp_rank * config.layout.tp + place.tp_rank
    method = f"file://{folder}/rendezvous"
    if size > 1:
        backend = "fake"
        _stand_in(state, own, size)
    else:
        backend = "nccl" if device.type == "cuda" else "gloo"
    with set_current_vllm_config(engine_config):
        if device.type == "cuda":
            _set_what_a_worker_sets()
        # On a GPU vLLM takes the local rank for the number of the device.
        local_rank = device.index or 0
        state.init_distributed_environment(size, own, method, local_rank, backend=backend)
        state.initialize_model_parallel(config.layout.tp, config.layout.pp)


def _set_what_a_worker_sets() -> None:
    """Variables of vLLM's that follow from VLLM_BATCH_INVARIANT, and are switches of the layout."""
    with contextlib.suppress(ImportError):  # a version that has it elsewhere
        from vllm.model_executor.determinism.batch_invariant import init_batch_invariance

        init_batch_invariance()


def _stand_in(state: Any, rank: int, size: int) -> None:
    """Has every group that vLLM makes be one of the ``fake`` backend."""
    import torch.distributed as distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    make_group, make_coordinator = distributed.new_group, state.init_model_parallel_group

    def new_group(ranks: Any = None, *rest: Any, **options: Any) -> Any:
        return make_group(ranks, *rest[:1], **{**options, "backend": "fake"})

    def coordinator(*arguments: Any, **options: Any) -> Any:
        # The broadcaster would wait for the other ranks, a device's communicator shake their hands.
        alone = {"use_message_queue_broadcaster": False, "use_device_communicator": False}
        return make_coordinator(*arguments, **{**options, **alone})

    distributed.new_group = new_group
    state.init_model_parallel_group = coordinator


def _loaded(
    engine_config: Any,
    config: Config,
    rank_id: RankId,
    progress: ProgressReport,
    device: torch.device,
) -> tuple[torch.nn.Module, dict[str, Any], Any]:
    """The finished model, its Python state, and the fingerprint that an engine would want."""
    from vllm.config import set_current_vllm_config

    from wcache.engines.vllm.disk import WatchedLoader
    from wcache.engines.vllm.wanted import wanted_by
    from wcache.load.order import check_content

    if device.type == "cpu":
        _silence_accelerator()
    with set_current_vllm_config(engine_config):
        wanted = wanted_by(engine_config, Orders(instance=rank_id.instance))
        wanted = dataclasses.replace(wanted, rank=rank_id)  # vLLM sees one replica of dp alone
        check_content(config, open_checkpoint(wanted.checkpoint.path), wanted.identity)
        progress.begin("read", wanted.shard_bytes)
        loader = WatchedLoader(engine_config.load_config, device.type)
        model: torch.nn.Module = loader.load_model(
            vllm_config=engine_config, model_config=engine_config.model_config
        )
    return model, loader.extras(model), wanted


def _silence_accelerator() -> None:
    """What vLLM's own CPU worker does: its loaders call these without asking for a device."""

    def nothing(*_: object, **__: object) -> None:
        return None

    accelerator: Any = torch.accelerator
    accelerator.synchronize = nothing
    accelerator.empty_cache = nothing
