"""The configuration file of an instance: its types, reading with every fault listed, writing."""

import grp
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from wcache.errors import ConfigError, ExitCode
from wcache.layout import Layout
from wcache.machine.permissions import who_may

MAX_CONFIG_BYTES = 1 << 20
MIN_SLAB_BYTES = 2 << 20
# As os.fsdecode() gives bytes that are not UTF-8.
_UNDECODED = re.compile("[\udc80-\udcff]")

Device = Literal["cpu", "cuda"]
Loader = Literal["safetensors", "publish", "vllm"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
Quantization = Literal["auto", "fp8"]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class ModelSection(Section, frozen=True, kw_only=True):
    """``[model]``: what is kept."""

    path: str
    """Checkpoint folder; for ``loader = "publish"`` any name."""
    hub_id: str | None = None
    """The hub id that ``path`` was resolved from."""
    revision: str | None = None
    """Commit of the hub snapshot, or what the operator called the revision."""
    content: str | None = None
    """Digest of the checkpoint when ``up`` was run; a loader that finds another one refuses."""
    loader: Loader = "safetensors"
    """``publish`` waits for the first engine to publish what it has loaded; ``vllm`` is vLLM's own
    loader, in a process of its own."""
    dtype: DType = "auto"
    """Floating-point dtype of the weights; ``auto`` keeps the checkpoint's."""
    quantization: Quantization = "auto"
    """``fp8`` quantizes linear layers block by block while they are loaded; ``auto`` keeps what the
    checkpoint has."""


class LayoutSection(Section, frozen=True, kw_only=True):
    """``[layout]``: see :class:`wcache.layout.Layout`."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    nnodes: int = 1
    node_rank: int = 0


class MemorySection(Section, frozen=True, kw_only=True):
    """``[memory]``: where the weights are kept."""

    device: Device = "cpu"
    devices: tuple[str, ...] = ()
    """UUIDs of the GPUs, by local rank; empty on the CPU."""
    slab_bytes: int = 1 << 30
    hugepages: bool = False
    """Take 2 MiB pages for host slabs where enough of them are free."""


class AccessSection(Section, frozen=True, kw_only=True):
    """``[access]``: who may use the control socket beside root and the daemon's own user."""

    group: str | None = None
    """Members may attach."""
    uids: tuple[int, ...] = ()
    """These users may attach."""
    publishers: tuple[int, ...] = ()
    """These users may publish weights too."""


class Config(Section, frozen=True, kw_only=True):
    """The whole file."""

    version: Literal[1] = 1
    model: ModelSection
    layout: LayoutSection = LayoutSection()
    memory: MemorySection = MemorySection()
    access: AccessSection = AccessSection()

    @property
    def ranks(self) -> Layout:
        return Layout(**msgspec.structs.asdict(self.layout))


def load_config(path: Path) -> Config:
    """Reads and checks ``path``; raises :class:`ConfigError` that lists every fault."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except PermissionError:
        raise ConfigError(
            f"no permission to read {path}",
            hint=who_may(path, os.R_OK),
            exit_code=ExitCode.NO_PERMISSION,
        ) from None
    except OSError as error:
        raise ConfigError(
            f"no configuration: {path}: {(error.strerror or '').lower()}",
            hint="wcache up --model … writes it",
        ) from None
    try:
        return parse_config(data, source=str(path))
    except ConfigError as error:
        error.hint = "mend the file, or move it away: wcache up --model … writes a new one"
        raise


def parse_config(data: bytes, *, source: str) -> Config:
    """Parses TOML; ``source`` begins each line of :attr:`ConfigError.problems`."""
    if len(data) > MAX_CONFIG_BYTES:
        raise _invalid(source, [f"is larger than {MAX_CONFIG_BYTES} bytes"])
    try:
        table = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _invalid(source, [f"is not TOML: {error}"]) from None
    if problems := list(_struct_problems(Config, table, "")):
        raise _invalid(source, problems)
    config = msgspec.convert(table, Config)
    if problems := list(_value_problems(config)):
        raise _invalid(source, problems)
    return config


def check_config(config: Config, *, source: str) -> Config:
    """Returns ``config``, or raises :class:`ConfigError` for values that do not fit together."""
    if problems := list(_value_problems(config)):
        raise _invalid(source, problems)
    return config


def save_config(config: Config, path: Path) -> None:
    """Writes ``path`` so that a reader sees the old file or the new one, whole."""
    import tomli_w

    table = _without_none(msgspec.to_builtins(config))
    text = "# Written by wcache up; wcache up writes it again.\n" + tomli_w.dumps(table)
    write_file(path, text.encode(), mode=0o644)


def write_file(path: Path, data: bytes, *, mode: int, sync: bool = True) -> None:
    """Writes to a temporary file beside ``path``, syncs it and renames it into place.

    Without ``sync`` a reader still never sees half of it; a power cut may lose it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(handle, mode)
            if sync:
                os.fsync(handle)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _invalid(source: str, problems: list[str]) -> ConfigError:
    lines = tuple(f"{source}: {problem}" for problem in problems)
    if len(lines) == 1:
        return ConfigError(lines[0], problems=lines)
    return ConfigError(f"{source}: {len(lines)} problems", problems=lines)


def _struct_problems(kind: type[Section], table: Any, prefix: str) -> Iterator[str]:
    """Yields what is wrong with each key, where msgspec alone would stop at the first."""
    if not isinstance(table, dict):
        yield f"{prefix.rstrip('.')}: expected a table, got {type(table).__name__}"
        return
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key in sorted(table.keys() - fields.keys()):
        yield f"{prefix}{key}: unknown key"
    for name, field in fields.items():
        if name not in table:
            if field.required:
                yield f"{prefix}{name}: missing"
        elif isinstance(field.type, type) and issubclass(field.type, Section):
            yield from _struct_problems(field.type, table[name], f"{prefix}{name}.")
        else:
            try:
                msgspec.convert(table[name], field.type)
            except msgspec.ValidationError as error:
                yield f"{prefix}{name}: {_reason(error, field.type, table[name])}"


def _reason(error: msgspec.ValidationError, kind: Any, value: Any) -> str:
    """In the words of the other problems: where few values are known, msgspec names none."""
    if get_origin(kind) is Literal and type(value) in {type(known) for known in get_args(kind)}:
        known = [repr(one) for one in get_args(kind)]
        return f"is {value!r}, must be {'one of ' if known[1:] else ''}{', '.join(known)}"
    reason = str(error)
    return f"{reason[0].lower()}{reason[1:]}"


def _value_problems(config: Config) -> Iterator[str]:
    layout = config.ranks
    faults = list(layout.problems())
    for name, problem in faults:
        yield f"layout.{name}: {problem}"
    # What the operating system takes for a name can be more than a text file can carry.
    for name in ("path", "hub_id", "revision"):
        value = getattr(config.model, name)
        if value is not None and _UNDECODED.search(value):
            yield f"model.{name}: is not UTF-8: {value}"
    if not config.model.path:
        yield "model.path: is empty"
    elif config.model.loader != "publish" and not Path(config.model.path).is_absolute():
        yield f"model.path: is not an absolute path: {config.model.path}"
    if config.model.loader == "publish" and config.model.quantization != "auto":
        yield 'model.quantization: does not go with loader = "publish": the engine decides on it'
    if config.model.loader == "vllm" and config.model.quantization != "auto":
        yield 'model.quantization: does not go with loader = "vllm": it keeps the checkpoint\'s'
    memory = config.memory
    if memory.slab_bytes < MIN_SLAB_BYTES or memory.slab_bytes % MIN_SLAB_BYTES:
        yield f"memory.slab_bytes: is {memory.slab_bytes}, must be a multiple of {MIN_SLAB_BYTES}"
    if memory.device == "cuda" and not faults and len(memory.devices) < layout.ranks_per_node:
        yield (
            f"memory.devices: names {len(memory.devices)} GPUs"
            f" for {layout.ranks_per_node} ranks on this node"
        )
    if memory.device == "cpu" and memory.devices:
        yield "memory.devices: names GPUs, but memory.device is cpu"
    if config.access.group is not None:
        try:
            grp.getgrnam(config.access.group)
        except KeyError:
            yield f"access.group: there is no group {config.access.group!r} on this machine"


def _without_none(value: Any) -> Any:
    """TOML has no null: what is absent is left out."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value
