"""Which of torchrun's processes this one is, and what they must agree on."""

import atexit
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as distributed

from wcache.engines.transformers.group import ALONE, Group
from wcache.errors import MismatchError, NotReadyError, UsageError, WcacheError
from wcache.fingerprint import Fingerprint, shared


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This process among those that torchrun, or accelerate, has started together."""

    number: int = 0
    size: int = 1
    local_number: int = 0
    """Among those of this machine."""
    local_size: int = 1
    """How many of them this machine has."""
    rank: int | None = None
    """The rank of the cache that was named; None where it follows from :attr:`number`."""

    @classmethod
    def here(cls, rank: int | None, environment: Mapping[str, str] = os.environ) -> "Place":
        """``rank`` is what the script named. Raises :class:`UsageError` for what is no number."""
        number, size = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
        if size is not None and size > 1 and number is None:
            raise UsageError(
                f"WORLD_SIZE is {size}, and RANK does not say which process this is",
                hint="torchrun sets both",
            )
        if rank is None:
            rank = _number(environment, "WCACHE_RANK")
        number, size = number or 0, size or 1
        local = _number(environment, "LOCAL_RANK")
        return cls(
            number=number,
            size=size,
            local_number=number if local is None else local,
            local_size=min(_number(environment, "LOCAL_WORLD_SIZE") or 1, size),
            rank=rank,
        )

    @property
    def is_joint(self) -> bool:
        """Whether all processes take their ranks at the same time, and in the same way."""
        return self.size > 1 and self.rank is None

    @property
    def cached_rank(self) -> int:
        """The rank whose weights this process takes."""
        if self.rank is not None:
            return self.rank
        return self.number if self.size > 1 else 0

    def check(self, held: Fingerprint) -> None:
        """Raises :class:`MismatchError` when the processes are not the layout of what is held."""
        tp, dp = held.tp_size or 1, held.dp_size or 1
        if tp == 1 and (not self.is_joint or dp == self.size):
            return
        if tp * dp != self.size:
            said = f" (WORLD_SIZE is {self.size})" if self.size > 1 else ""
            raise MismatchError(
                f"rank {self.cached_rank} holds other weights: tp_size: cached {tp}, wanted"
                f" {self.size // dp or 1}{said}",
                hint=_other_size(tp, dp, self.size),
            )
        if held.tp_rank != self.number % tp:
            raise MismatchError(
                f"rank {self.cached_rank} holds other weights: tp_rank: cached {held.tp_rank},"
                f" wanted {self.number % tp} (RANK is {self.number})",
                hint="let from_cache() find the rank of each process",
            )

    def join(self) -> bool:
        """Sets up torch.distributed, where the script has not: gloo, and nccl where GPUs are.

        Returns whether it did. Raises :class:`WcacheError` when they do not find each other.
        """
        if distributed.is_initialized():
            if distributed.get_world_size() != self.size:
                raise UsageError(
                    f"torch.distributed has {distributed.get_world_size()} processes, and"
                    f" WORLD_SIZE is {self.size}"
                )
            return False
        # Known before the weights are, and the same for all: one that has none must say so too.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            distributed.init_process_group(backend)
        except (RuntimeError, ValueError, OSError) as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise WcacheError(f"torch.distributed can not be set up: {line[:300]}") from None
        atexit.register(_leave_gloo)
        return True

    def agree(
        self,
        problem: WcacheError | None,
        held: Fingerprint | None = None,
        *,
        task: str = "use the cached weights",
    ) -> WcacheError | None:
        """What keeps any of the processes from its ``task``, or what it holds; None when all can.

        A model that some have from the cache and others from disk is two models, and so is one of
        ranks of which some have switched to other weights already.
        """
        if not self.is_joint:
            return problem
        device = torch.device("cpu") if "gloo" in _backends() else self._exchange_device()
        mine = torch.tensor([problem is None, _number_of(held)], dtype=torch.int64, device=device)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(every, mine)
        told = [(bool(able), number) for able, number in torch.stack(every).tolist()]
        without = [process for process, (able, _) in enumerate(told) if not able]
        if problem is not None:
            return problem
        if without:
            return NotReadyError(
                f"{_processes(without)} of {self.size} can not {task}, so none does"
            )
        others = [process for process, (_, number) in enumerate(told) if number != told[0][1]]
        if others:
            return MismatchError(
                f"{_processes(others)} of {self.size} would have other weights than process 0",
                hint="wcache status shows what each rank serves; a switch is over in a moment",
            )
        return None

    @property
    def gpu(self) -> int:
        """The number of this process's GPU: one that was chosen, or else one for itself."""
        chosen = torch.cuda.current_device()
        if self.is_joint and not chosen:
            return self.local_number % torch.cuda.device_count()
        return chosen

    def _exchange_device(self) -> torch.device:
        """Where a script's group that has GPUs alone takes tensors: no two ranks on one GPU."""
        bound: torch.device | None = getattr(distributed.group.WORLD, "bound_device_id", None)
        return bound or torch.device("cuda", self.gpu)

    def group(self, tp: int, device: torch.device) -> Group:
        """The ``tp`` processes that have the shards of one model, for weights on ``device``.

        Raises :class:`UsageError` when this process computes on another GPU than that.
        """
        if tp == 1:
            return ALONE
        was_set_up = distributed.is_initialized()
        self.join()
        if device.type == "cuda":
            if was_set_up and torch.cuda.current_device() not in (0, device.index):
                raise UsageError(
                    f"the weights of rank {self.cached_rank} lie on {device}, and this process has"
                    f" chosen cuda:{torch.cuda.current_device()}",
                    hint="leave the choice to from_cache(): model.device says where to compute",
                )
            torch.cuda.set_device(device)
        handle = None
        if tp < self.size:
            # Each process takes part in the making of every group.
            firsts = range(0, self.size, tp)
            handles = [distributed.new_group(range(first, first + tp)) for first in firsts]
            handle = handles[self.number // tp]
        return Group(rank=self.number % tp, size=tp, handle=handle)


def _other_size(tp: int, dp: int, size: int) -> str:
    if size == 1:
        return (
            f"torchrun --nproc-per-node {tp} starts a process for each rank; wcache up"
            " --instance NAME --model … loads the whole model for one"
        )
    processes = "1 process" if tp * dp == 1 else f"{tp * dp} processes"
    return (
        f"start {processes} (torchrun --nproc-per-node), load with wcache up --model … --tp"
        f" {size}, or name a rank with the whole model: from_cache(rank=…)"
    )


def _processes(numbers: Sequence[int]) -> str:
    return f"{'process' if len(numbers) == 1 else 'processes'} {', '.join(map(str, numbers))}"


def _number_of(held: Fingerprint | None) -> int:
    """63 bits of the digest of what all ranks of a model have alike."""
    if held is None:
        return 0
    return int(shared(held).digest().removeprefix("sha256:")[:16], 16) >> 1


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"{name} is not a number: {text!r}")
    return int(text)


def leave() -> None:
    """Gives the process group up, if there is one. No exchange of these processes may be open."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _leave_gloo() -> None:
    """Before Python ends: a thread of gloo's that meets its end now and then raises SIGABRT.

    One of nccl would wait for the others here, which may wait in an exchange for this process: a
    script that has failed must end, for torchrun to end the others.
    """
    if distributed.is_initialized() and "nccl" not in _backends():
        leave()


def _backends() -> str:
    return str(distributed.get_backend_config())
