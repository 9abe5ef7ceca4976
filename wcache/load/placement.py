"""Which part of which tensor a rank holds: tensor- and pipeline-parallel placement. Pure."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import gcd

from wcache import gate
from wcache.checkpoint import Checkpoint
from wcache.checkpoint.ties import HEAD, tied_embedding
from wcache.config import Config
from wcache.errors import CheckpointError
from wcache.layout import Layout
from wcache.load import blocks
from wcache.load.architectures import ASK, Architectures
from wcache.load.linears import quantizable
from wcache.load.parallel import HINT_PUBLISH, ParallelPlan
from wcache.load.plan import Part, Plan, Slice, lay_out
from wcache.load.stages import Stages

CONVERTIBLE = ("F64", "F32", "F16", "BF16")
"""Dtypes that ``model.dtype`` applies to: integers, booleans and 8-bit floats mean something else
than their value, and stay as they are."""
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

_COLWISE = ("colwise", "colwise_rep", "colwise_gather_output")
_ROWWISE = ("rowwise", "rowwise_rep", "rowwise_split_input")
_EMBEDDING = {"embedding_rowwise": 0, "embedding_colwise": 1}
_WHOLE = ("sequence_parallel", "replicated_with_grad_allreduce", "replicate", "all_reduce")
"""Styles that are about activations or gradients: every rank keeps the whole parameter."""

# Heads are at stake only where attention itself runs sharded: the styles that gather their output
# or split their input run it whole on every rank.
_HEADED = ("colwise", "rowwise")
_KV = ("k_proj", "v_proj", "key", "value")
_FUSED = ("qkv_proj", "query_key_value", "qkv", "c_attn", "Wqkv")


def plan(
    checkpoint: Checkpoint, config: Config, rank: int, architectures: Architectures = ASK
) -> Plan:
    """What ``rank`` holds of ``checkpoint``, and where; raises what :func:`placement` does."""
    return placement(checkpoint, config, architectures).of(rank)


def placement(
    checkpoint: Checkpoint, config: Config, architectures: Architectures = ASK
) -> "Placement":
    """How ``checkpoint`` is spread over all ranks of ``config``.

    Raises :class:`CheckpointError` when it can not be spread or quantized as ``config`` asks, with
    the tensor and the numbers, and what :func:`wcache.gate.check` raises. transformers is needed
    for tp > 1, pp > 1 and quantizing only, and imported where ``architectures`` does not know.
    """
    layout = config.ranks
    if layout.ep > 1:
        raise CheckpointError(
            f"ep {layout.ep}: experts are placed by an engine's own loader", hint=HINT_PUBLISH
        )
    is_spread = layout.tp > 1 or layout.pp > 1
    method = gate.check(checkpoint).method
    if method != "none" and config.model.dtype != "auto":
        # The scales of quantized weights have floating dtypes too, and lose their meaning rounded.
        raise CheckpointError(
            f"weights quantized with {method} can not be converted to {config.model.dtype}",
            hint="use --dtype auto",
        )
    # A checkpoint in FP8 is what was asked for already.
    on_load = config.model.quantization == "fp8" and method == "none"
    quantized = (
        quantizable(checkpoint, architectures.fp8_layers(checkpoint)) if on_load else frozenset()
    )
    return Placement(
        checkpoint,
        layout,
        dtype=DTYPES.get(config.model.dtype),
        parallel=architectures.parallel_plan(checkpoint) if is_spread else None,
        tied=tied_embedding(checkpoint),
        quantized=quantized,
    )


def place(
    checkpoint: Checkpoint,
    layout: Layout,
    rank: int,
    *,
    dtype: str | None = None,
    parallel: ParallelPlan | None = None,
    tied: str | None = None,
    quantized: Collection[str] = (),
) -> Plan:
    """:func:`plan` after everything was read: pure. The rest as :class:`Placement` has it."""
    spread = Placement(
        checkpoint, layout, dtype=dtype, parallel=parallel, tied=tied, quantized=quantized
    )
    return spread.of(rank)


class Placement:
    """A checkpoint over the ranks of a layout: what is the same for all of them is found once.

    ``dtype`` is a safetensors name, or None to keep each tensor's; ``tied`` names the tensor that
    the output head is tied to, ``quantized`` the weights that become FP8 on their way.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: Layout,
        *,
        dtype: str | None = None,
        parallel: ParallelPlan | None = None,
        tied: str | None = None,
        quantized: Collection[str] = (),
    ) -> None:
        self._tensors, self._layout = checkpoint.tensors, layout
        self._dtype, self._tied, self._quantized = dtype, tied, quantized
        names = set(checkpoint.tensors)
        self._shards: Shards | None = None
        if parallel is not None and layout.tp > 1:
            self._shards = Shards.of(parallel, names, layout.tp, 0, tied)
        self._names: list[list[str]] = [list(self._tensors)]
        """By stage, in the order of the checkpoint."""
        if parallel is not None and layout.pp > 1:
            stages = Stages.of(parallel, names, layout.pp)
            self._names = [[] for _ in range(layout.pp)]
            for name in self._tensors:
                self._names[stages.stage_of(name)].append(name)

    def of(self, rank: int) -> Plan:
        """What ``rank`` holds, and where; raises :class:`CheckpointError` as :func:`placement`."""
        at = self._layout.coordinates(rank)
        shards = self._shards and replace(self._shards, tp_rank=at.tp_rank)
        names = self._names[at.pp_rank if len(self._names) > 1 else 0]
        tied = self._tied if names is self._names[-1] else None
        if tied is not None and (held := {*names, tied}) != set(names):
            # A tied embedding is needed at both ends of the pipeline.
            names = [name for name in self._tensors if name in held]
        is_one = self._tied is not None
        parts = [self._part(shards, name) for name in names if not (is_one and name == HEAD)]
        if tied is not None:
            parts.append(self._part(shards, tied, HEAD))
        return lay_out(parts)

    def of_each_stage(self, ranks: Iterable[int]) -> Iterator[tuple[list[int], Plan]]:
        """The ``ranks`` that hold the same tensors, and the plan of the first of them.

        The shards of the others are as large, for tp divides what is cut of any tensor, and refused
        for the same reasons.
        """
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(self._layout.coordinates(rank).pp_rank, []).append(rank)
        for alike in found.values():
            yield alike, self.of(alike[0])

    def _part(self, shards: "Shards | None", source: str, name: str | None = None) -> Part:
        """Tensor ``source``, or ``name``, which is tied to it: they are one, and cut alike."""
        entry = self._tensors[source]
        dtype = self._dtype if entry.dtype in CONVERTIBLE else None
        return Part(
            name or source,
            entry,
            dtype or entry.dtype,
            blocks.cut(shards, source, self._tensors, self._quantized),
            source if name else None,
            (name or source) in self._quantized,
        )


@dataclass(frozen=True, kw_only=True)
class Shards:
    """The tensor-parallel rules of a model, with the names that its checkpoint has."""

    tp: int
    tp_rank: int
    rules: dict[str, str]
    """Style by module, with layer numbers as ``*``."""
    attention_heads: tuple[int, ...] = field(default=())
    kv_heads: tuple[int, ...] = field(default=())

    @classmethod
    def of(
        cls, parallel: ParallelPlan, names: set[str], tp: int, tp_rank: int, tied: str | None
    ) -> "Shards":
        """Raises :class:`CheckpointError` when there is no plan or it is not for these names."""
        prefix = parallel.prefix_in(names)
        base = {prefix + key: style for key, style in parallel.base.items()}
        if not base:
            raise CheckpointError(
                f"tp {tp}: transformers has no tensor-parallel plan for {parallel.architecture}",
                hint=HINT_PUBLISH,
            )
        _check_fits(parallel.architecture, base, names)
        rules = base | dict(parallel.head)
        # The input embedding is sharded by rows wherever a plan does not name it. transformers does
        # so too of late (5.24 does, 5.17 did not), as vLLM and SGLang always did; ours does not
        # depend on the version, so that all ranks of a model agree.
        rules.setdefault(prefix + "embed_tokens", "embedding_rowwise")
        if tied is not None:
            _settle_tie(rules, tied)
        return cls(
            tp=tp,
            tp_rank=tp_rank,
            rules=rules,
            attention_heads=parallel.attention_heads,
            kv_heads=parallel.kv_heads,
        )

    def slice(self, name: str, shape: tuple[int, ...]) -> Slice | None:
        """The part of a tensor for this rank; None for all of it."""
        found = _find(self.rules, name)
        if found is None:
            return None
        style, depth = found
        if style in _WHOLE:
            return None
        dim = _dimension(style, depth, name, shape)
        if dim is None:
            return None
        if style in _HEADED:
            self._check_heads(name)
        if shape[dim] % self.tp:
            raise CheckpointError(
                f"tp {self.tp} does not divide dimension {dim} of {name!r}, which has {shape[dim]}",
                hint=f"tp can be {self._possible(shape[dim])}"
                if self._cuts_heads()
                else f"use a tp that divides {shape[dim]}",
            )
        width = shape[dim] // self.tp
        return Slice(dim, self.tp_rank * width, (self.tp_rank + 1) * width)

    def _check_heads(self, name: str) -> None:
        *modules, _ = name.split(".")
        if not _is_attention(modules):
            return
        kinds = [("attention", self.attention_heads), ("key-value", self.kv_heads)]
        if modules[-1] in _KV:
            del kinds[0]
        elif modules[-1] not in _FUSED:
            del kinds[1]
        for kind, counts in kinds:
            if not counts:
                raise CheckpointError(
                    f"tp {self.tp}: config.json does not say how many {kind} heads {name!r} has",
                    hint=HINT_PUBLISH,
                )
            for count in counts:
                if count % self.tp:
                    heads = "head" if count == 1 else "heads"
                    raise CheckpointError(
                        f"tp {self.tp} would split a head: {count} {kind} {heads} in {name!r}",
                        hint=f"tp can be {self._possible()}",
                    )

    def _cuts_heads(self) -> bool:
        """Whether heads of a known number are split over ranks: then they limit tp the most."""
        styled = any(
            style in _HEADED and _is_attention(key.split(".")) for key, style in self.rules.items()
        )
        return styled and bool(self.attention_heads and self.kv_heads)

    def _possible(self, length: int = 0) -> str:
        """What all heads, and ``length`` where one is given, can be divided by."""
        common = gcd(*self.attention_heads, *self.kv_heads, length)
        return ", ".join(str(tp) for tp in range(1, common + 1) if common % tp == 0)


def _is_attention(modules: Collection[str]) -> bool:
    return any("attn" in module or "attention" in module for module in modules)


def generic(name: str) -> str:
    """``model.layers.3.mlp`` as plans write it, ``model.layers.*.mlp``."""
    return ".".join("*" if module.isdigit() else module for module in name.split("."))


def _ancestors(name: str) -> Iterator[str]:
    """The name itself, its module, the module around that, and so on."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _find(rules: dict[str, str], name: str) -> tuple[str, int] | None:
    """The innermost rule for a tensor, and how many modules around it that rule is."""
    for depth, key in enumerate(_ancestors(generic(name))):
        if key in rules:
            return rules[key], depth
    return None


def _dimension(style: str, depth: int, name: str, shape: tuple[int, ...]) -> int | None:
    """The dimension that ``style`` cuts of a parameter of a linear layer or an embedding.

    A weight is ``[out, in]``: colwise cuts the outputs and with them the bias, rowwise cuts the
    inputs, and the bias, which is added once after the sum, stays whole. Anything else under such a
    module, a scale or a packed weight, needs its engine's rules and is refused.
    """
    kind = name.rpartition(".")[2]
    if depth <= 1 and kind == "weight" and len(shape) == 2:
        if style in _COLWISE:
            return 0
        if style in _ROWWISE:
            return 1
        if style in _EMBEDDING:
            return _EMBEDDING[style]
    if depth <= 1 and kind == "bias" and len(shape) == 1:
        if style in _COLWISE:
            return 0
        if style in _ROWWISE:
            return None
    raise CheckpointError(
        f"tensor {name!r} has the tensor-parallel style {style!r}, which wcache can not apply to"
        f" the shape {list(shape)}",
        hint=HINT_PUBLISH,
    )


def _check_fits(architecture: str, rules: dict[str, str], names: set[str]) -> None:
    """Refuses a plan that names modules which the checkpoint does not have.

    transformers renames and fuses tensors of some models while it loads them (experts above all);
    a rule that finds nothing would leave a tensor whole that was to be sharded, without a word.
    """
    known = {key for name in {generic(name) for name in names} for key in _ancestors(name)}
    # Styles that can not be applied come first: they say more than a name that is not there.
    applied = (*_COLWISE, *_ROWWISE, *_EMBEDDING)
    for key, style in sorted(rules.items(), key=lambda rule: rule[1] in applied):
        if style not in _WHOLE and key not in known:
            raise CheckpointError(
                f"the tensor-parallel plan of {architecture} names {key} ({style}),"
                " which the checkpoint does not have",
                hint=HINT_PUBLISH,
            )


def _settle_tie(rules: dict[str, str], tied: str) -> None:
    """Checks that head and embedding are cut alike.

    They are one tensor, so :class:`Placement` asks for the embedding's rule only. Where the plan
    names the head alone, the embedding takes the head's rule, and colwise and embedding_rowwise are
    the same cut: of the vocabulary, dimension 0. Where it names the embedding alone, that one
    holds.
    """
    head, embedding = HEAD.rpartition(".")[0], tied.rpartition(".")[0]
    if head not in rules:
        return
    if embedding not in rules:
        rules[embedding] = rules[head]
        return
    cuts = {cut_dimension(rules[head]), cut_dimension(rules[embedding])}
    if len(cuts) > 1:
        raise CheckpointError(
            f"{HEAD!r} ({rules[head]}) is tied to {tied!r} ({rules[embedding]}),"
            " and the two are sharded along different dimensions",
            hint=HINT_PUBLISH,
        )


def cut_dimension(style: str) -> int | str | None:
    """The dimension of a weight that ``style`` cuts, None for none, or an unknown style itself."""
    if style in _COLWISE:
        return 0
    if style in _ROWWISE:
        return 1
    return None if style in _WHOLE else _EMBEDDING.get(style, style)
