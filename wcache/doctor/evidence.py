"""What the checks of ``doctor`` look at, gathered once."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from wcache import gate
from wcache.checkpoint import Checkpoint, Identity, identify, open_checkpoint
from wcache.config import Config
from wcache.errors import CheckpointError, ConfigError, NoPermissionError, WcacheError
from wcache.install import Target
from wcache.machine import devices
from wcache.machine.devices import Gpu
from wcache.machine.permissions import who_may
from wcache.paths import InstancePaths
from wcache.ranks import RankView, known_ranks, read_config, view
from wcache.supervise.direct.client import DirectSupervisor
from wcache.supervise.direct.record import RECORD_NAME, load_ranks
from wcache.supervise.interface import Supervisor
from wcache.supervise.systemd.manager import SystemdSupervisor, manager_here, units_installed


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where the kernel and the tools of a machine tell of themselves."""

    meminfo: Path = Path("/proc")
    hugepages: Path = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
    shm: Path = Path("/dev/shm")
    linger: Path = Path("/var/lib/systemd/linger")
    dev: Path = Path("/dev")
    modules: Path = Path("/proc/modules")
    mps_pipes: Path = field(
        default_factory=lambda: Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Manager:
    """The service manager that would keep this user's ranks."""

    version: int
    """Of systemd; 0 where none runs."""
    target: Target
    overrides: tuple[Path, ...] = ()
    """Folders whose units go before those of ``target``, and that are the operator's."""

    @property
    def is_running(self) -> bool:
        return self.version > 0

    @property
    def systemctl(self) -> str:
        return "systemctl --user" if self.target.is_user else "systemctl"

    @property
    def install(self) -> str:
        return "wcache install --user" if self.target.is_user else "wcache install"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One instance on one machine, at one moment."""

    instance: InstancePaths
    manager: Manager
    config: Config | None = None
    """None where there is none, or none that can be read: then ``problems`` says why."""
    problems: tuple[str, ...] = ()
    others: Mapping[str, Config] = field(default_factory=dict)
    """Configurations of the other instances, by name; empty for the default one."""
    supervisor: Literal["direct", "systemd"] = "direct"
    views: Mapping[int, RankView] = field(default_factory=dict)
    keeper: int = 0
    """The pid of wcache's own supervisor; 0 without one, and where it can not be told."""
    rivals: tuple[int, ...] = ()
    """Ranks that wcache's own supervisor keeps and whose units systemd starts all the same."""
    silence: str = ""
    """Why ranks or supervisor could not be asked; empty when they could."""
    silence_mend: str = ""
    """What helps then, if the one who kept silent is at fault."""
    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    """The NVIDIA driver's version; empty without one."""
    driver_fault: str = ""
    """Why a driver that is there could not be asked."""
    machine: Machine = field(default_factory=Machine)
    now: float = 0.0

    @property
    def wants_gpus(self) -> bool:
        return self.config is not None and self.config.memory.device == "cuda"

    @cached_property
    def checkpoint(self) -> Checkpoint | CheckpointError | None:
        """None where no configuration names one."""
        if self.config is None or self.config.model.loader == "publish":
            return None
        try:
            found = open_checkpoint(Path(self.config.model.path))
            gate.check(found)
            return found
        except CheckpointError as error:
            return error

    @cached_property
    def identity(self) -> Identity | CheckpointError | None:
        if not isinstance(self.checkpoint, Checkpoint):
            return self.checkpoint
        try:
            return identify(self.checkpoint)
        except CheckpointError as error:
            return error

    def waiting(self) -> list[int]:
        """Ranks of the configuration that still have to load their weights."""
        if self.config is None:
            return []
        found = (self.views.get(rank) for rank in self.config.ranks.local_ranks())
        local = zip(self.config.ranks.local_ranks(), found, strict=True)
        return [rank for rank, one in local if one is None or not one.serves(self.config)]


def gather(
    instance: InstancePaths, supervisor: Supervisor, manager: Manager, now: float
) -> Evidence:
    """Asks everybody. What can not be asked is left out, and said in ``silence``."""
    problems: tuple[str, ...] = ()
    config = None
    try:
        config = read_config(instance)
    except ConfigError as error:
        problems = error.problems or (error.message,)
    silence = silence_mend = ""
    ranks = {*known_ranks(instance), *_recorded(instance)}
    try:
        if isinstance(supervisor, SystemdSupervisor):
            # Also those of which there is nothing left but stored descriptors.
            ranks.update(supervisor.known_ranks())
        views = view(instance, sorted(ranks), supervisor)
    except WcacheError as error:
        if isinstance(error, NoPermissionError) and os.geteuid() != 0:
            # Its hint says who may, and not what to do.
            silence = f"{error.message}: {error.hint}" if error.hint else error.message
        else:
            silence, silence_mend = error.message, error.hint
        views = _daemons_alone(instance, sorted(ranks))
    # Ranks without a configuration are known by their folders alone.
    silence = silence or who_may(instance.run, os.X_OK)
    gpus: tuple[Gpu, ...] = ()
    driver = driver_fault = ""
    try:
        driver, gpus = devices.driver_version(), devices.gpus()
    except WcacheError as error:
        driver_fault = error.message
    return Evidence(
        instance=instance,
        manager=manager,
        config=config,
        problems=problems,
        others=_others(instance),
        supervisor=supervisor.kind,
        views=views,
        keeper=_keeper(supervisor),
        rivals=_rivals(instance.instance, views) if supervisor.kind == "direct" else (),
        silence=silence,
        silence_mend=silence_mend,
        gpus=gpus,
        driver=driver,
        driver_fault=driver_fault,
        now=now,
    )


def _keeper(supervisor: Supervisor) -> int:
    try:
        return supervisor.pid() if isinstance(supervisor, DirectSupervisor) else 0
    except WcacheError:  # there is none, or what is wrong with it is told above
        return 0


def _recorded(instance: InstancePaths) -> tuple[int, ...]:
    """Ranks that wcache's own supervisor has started; none where that is not for us to read."""
    record = instance.supervisor_folder / RECORD_NAME
    return () if who_may(record, os.R_OK) else load_ranks(record)


def _daemons_alone(instance: InstancePaths, ranks: list[int]) -> dict[int, RankView]:
    try:
        return view(instance, ranks, None)
    except WcacheError:  # of the same kind as the first, which is told
        return {}


def _rivals(instance: str, views: Mapping[int, RankView]) -> tuple[int, ...]:
    manager = manager_here()
    if manager is None or not units_installed(manager):
        return ()
    try:
        units = SystemdSupervisor(instance, manager).show(views)
    except WcacheError:  # systemd has a check of its own
        return ()
    at_work = ("starting", "restarting")
    return tuple(rank for rank, one in views.items() if one.report and units[rank].state in at_work)


def _others(instance: InstancePaths) -> dict[str, Config]:
    """Configurations that can not be read are their own instance's affair."""
    found = {}
    for path in sorted(instance.config.glob("*.toml")):
        name = "" if path.stem == "wcache" else path.stem
        if name == instance.instance:
            continue
        try:
            config = read_config(InstancePaths(name, instance.run, instance.config, instance.state))
        except ConfigError:
            continue
        if config is not None:
            found[name] = config
    return found
