"""What weights are: the fingerprint of a rank, and how two of them are compared. Pure."""

from collections.abc import Iterator

import msgspec

import wcache
from wcache.config import Config, ModelSection
from wcache.difference import Difference

NOT_SET = "not set"


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that decides which bytes a rank holds, and a few fields for people.

    As *held*, every field that its loader knew is set. As *wanted*, only the fields are set that
    must agree: ``None`` asks for nothing.
    """

    model: str | None = None
    """Path or hub id. For people: ``content`` is what tells two models apart."""
    architecture: str | None = None
    revision: str | None = None
    content: str | None = None
    """Digest of the checkpoint (:mod:`wcache.checkpoint.identity`)."""
    loader: str | None = None
    loader_version: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    """``none`` or a method of :mod:`wcache.gate`."""
    quantization_config: str | None = None
    """:func:`digest_of` what config.json says of the method, or would say of what was made."""
    tp_size: int | None = None
    tp_rank: int | None = None
    pp_size: int | None = None
    pp_rank: int | None = None
    dp_size: int | None = None
    dp_rank: int | None = None
    ep_size: int | None = None
    ep_rank: int | None = None
    node_rank: int | None = None
    device: str | None = None
    device_uuid: str | None = None
    device_capability: str | None = None
    torch_version: str | None = None
    engine: str | None = None
    engine_version: str | None = None
    switches: dict[str, str] | None = None
    """Engine settings that change the layout of the weights, by name: all that were set
    (:mod:`wcache.switches`). One more or one less is another layout."""

    def digest(self) -> str:
        """``sha256:`` and 64 hexadecimal digits over the canonical JSON of all fields."""
        return digest_of(self)


def compare(held: Fingerprint, wanted: Fingerprint) -> tuple[Difference, ...]:
    """Every field that ``wanted`` states and ``held`` does not meet; empty when they match.

    A field that is wanted and not known of what is held is a difference: a doubt is a mismatch.
    """
    found: list[Difference] = []
    for field in msgspec.structs.fields(Fingerprint):
        want, have = getattr(wanted, field.name), getattr(held, field.name)
        if want is None or have == want:
            continue
        if field.name == "switches" and have is not None:
            found += _switches(have, want)
        else:
            found.append(Difference(field.name, text_of(have), text_of(want)))
    return tuple(found)


def _switches(held: dict[str, str], wanted: dict[str, str]) -> Iterator[Difference]:
    for name in sorted(held.keys() | wanted.keys()):
        have, want = held.get(name, NOT_SET), wanted.get(name, NOT_SET)
        if have != want:
            yield Difference(f"switches.{name}", have, want)


# Names for people, and what a fix of wcache changes.
_NAMES = frozenset({"model", "revision", "loader_version"})
# What an engine makes of weights depends on it; what wcache reads from a checkpoint does not.
_OF_ENGINES = frozenset(
    {"dp_size", "dp_rank", "node_rank", "torch_version", "device_capability", "engine"}
    | {"engine_version", "switches"}
)


def decisive(held: Fingerprint) -> Fingerprint:
    """Of ``held`` the fields that other weights must meet to be the same bytes."""
    if held.loader == "safetensors":
        passed = _NAMES | _OF_ENGINES
    elif held.content is not None:
        passed = _NAMES
    else:
        # Nothing but the name that the operator gave says which model it is.
        passed = _NAMES - {"model"}
    return msgspec.structs.replace(held, **dict.fromkeys(passed))


# Where a rank is in its layout.
_PLACES = frozenset({"tp_rank", "pp_rank", "dp_rank", "ep_rank", "node_rank", "device_uuid"})


def shared(held: Fingerprint) -> Fingerprint:
    """Of ``held`` the fields that all ranks of one model have alike."""
    return msgspec.structs.replace(decisive(held), **dict.fromkeys(_PLACES))


def differences(one: Fingerprint, other: Fingerprint) -> tuple[Difference, ...]:
    """Where two fingerprints of held weights are not of the same bytes; empty when they are.

    ``cached`` of each difference is of ``one`` and ``wanted`` of ``other``. A field that is known
    of one side only is a difference.
    """
    found = {entry.field: entry for entry in compare(one, decisive(other))}
    for entry in compare(other, decisive(one)):
        found.setdefault(entry.field, Difference(entry.field, entry.wanted, entry.cached))
    order = [field.name for field in msgspec.structs.fields(Fingerprint)]
    return tuple(sorted(found.values(), key=lambda entry: order.index(entry.field.split(".")[0])))


def text_of(value: object) -> str:
    """A field's value as a person reads it."""
    if isinstance(value, dict):
        return ", ".join(f"{name}={value[name]}" for name in sorted(value)) or "none"
    return "unknown" if value is None else str(value)


def wanted_by(config: Config, rank: int) -> Fingerprint:
    """The fields that ``config`` settles for ``rank``: what held weights are compared with."""
    place = config.ranks.coordinates(rank)
    devices = config.memory.devices
    layout = config.layout
    if config.model.loader == "publish":
        # An engine shards and converts as it likes; only what the operator named can be asked for.
        return Fingerprint(model=config.model.path, loader="publish", device=config.memory.device)
    return Fingerprint(
        content=config.model.content,
        loader=config.model.loader,
        dtype=_dtype(config.model)
        if config.model.loader == "safetensors"
        else _engine_dtype(config),
        quantization="fp8" if config.model.quantization == "fp8" else None,
        tp_size=layout.tp,
        tp_rank=place.tp_rank,
        pp_size=layout.pp,
        pp_rank=place.pp_rank,
        ep_size=layout.ep,
        ep_rank=place.ep_rank,
        device=config.memory.device,
        device_uuid=devices[place.local_rank] if devices else None,
    )


def _engine_dtype(config: Config) -> str | None:
    """None where the engine chooses, as ``auto`` has it: it then says what it has chosen."""
    return None if config.model.dtype == "auto" else config.model.dtype


def _dtype(model: ModelSection) -> str:
    """What the configuration makes of the checkpoint's dtypes.

    Quantizing is a part of it, since ``quantization`` alone can not ask for weights that were *not*
    quantized on their way: what a checkpoint has is not in the configuration.
    """
    if model.quantization == "auto":
        return model.dtype
    if model.dtype == "auto":
        return model.quantization
    return f"{model.quantization}+{model.dtype}"


def digest_of(settings: object) -> str:
    """``sha256:`` and 64 hexadecimal digits over the canonical JSON of ``settings``."""
    # With OpenSSL, which takes long to load, and a status has no use for it.
    import hashlib

    data = msgspec.json.encode(settings, order="deterministic")
    return "sha256:" + hashlib.sha256(data).hexdigest()


def held_from(config: Config, rank: int, **known: str | None) -> Fingerprint:
    """The fingerprint of weights that were just loaded by ``config`` for ``rank``.

    ``known`` are the fields that only the loader can tell, by name.
    """
    place = config.ranks.coordinates(rank)
    layout, wanted = config.layout, wanted_by(config, rank)
    told: dict[str, str | int | None] = {
        "model": config.model.hub_id or config.model.path,
        "revision": config.model.revision,
        "loader_version": wcache.__version__,
        "tp_size": layout.tp,
        "tp_rank": place.tp_rank,
        "pp_size": layout.pp,
        "pp_rank": place.pp_rank,
        "dp_size": layout.dp,
        "dp_rank": place.dp_rank,
        "ep_size": layout.ep,
        "ep_rank": place.ep_rank,
        "node_rank": place.node_rank,
    }
    told.update(known)
    return msgspec.structs.replace(wanted, **told)
