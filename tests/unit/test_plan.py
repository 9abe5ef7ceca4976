"""Which part of which tensor a rank holds, and the refusals that come before anything is read."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoints import (
    llama_config,
    llama_tensors,
    write_checkpoint,
    write_llama,
    write_qwen3,
)
from tests.loading import EMBEDDING, LLAMA
from wcache.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from wcache.config import Config, LayoutSection, ModelSection
from wcache.errors import CheckpointError
from wcache.layout import Layout
from wcache.load.placement import Shards, place, plan
from wcache.load.plan import Part, Plan, Slice, Target, lay_out
from wcache.load.stages import layers_per_stage
from wcache.manifest import DTYPE_BYTES

pytestmark = pytest.mark.unit


def _config(path: Path, *, dtype: str = "auto", **layout: int) -> Config:
    model = ModelSection(path=str(path), dtype=dtype)  # type: ignore[arg-type]  # a test's literal
    return Config(model=model, layout=LayoutSection(**layout))


def _by_name(planned: Plan) -> dict[str, Target]:
    return {target.name: target for target in planned.targets}


@pytest.fixture
def llama(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_llama(tmp_path / "m"))


def _shards(tp: int = 3, tp_rank: int = 0, **rules: str) -> Shards:
    return Shards(
        tp=tp, tp_rank=tp_rank, rules={"x." + name: style for name, style in rules.items()},
        attention_heads=(6,), kv_heads=(3,),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("style", "leaf", "shape", "expected"),
    [
        ("colwise", "weight", (12, 5), Slice(0, 4, 8)),
        ("colwise", "bias", (12,), Slice(0, 4, 8)),
        ("colwise_rep", "weight", (12, 5), Slice(0, 4, 8)),
        ("colwise_gather_output", "weight", (12, 5), Slice(0, 4, 8)),
        ("rowwise", "weight", (5, 12), Slice(1, 4, 8)),
        ("rowwise", "bias", (5,), None),
        ("rowwise_rep", "weight", (5, 12), Slice(1, 4, 8)),
        ("rowwise_split_input", "weight", (5, 12), Slice(1, 4, 8)),
        ("embedding_rowwise", "weight", (12, 5), Slice(0, 4, 8)),
        ("embedding_colwise", "weight", (5, 12), Slice(1, 4, 8)),
        ("sequence_parallel", "weight", (5,), None),
        ("replicated_with_grad_allreduce", "weight", (5,), None),
        ("replicate", "weight", (5, 7), None),
    ],
)
def test_each_style_cuts_its_dimension(
    style: str, leaf: str, shape: tuple[int, ...], expected: Slice | None
) -> None:
    assert _shards(3, 1, layer=style).slice(f"x.layer.{leaf}", shape) == expected


@pytest.mark.parametrize(
    "style",
    ["packed_colwise", "packed_rowwise", "moe_tp_experts", "mla_kv_a_proj", "grouped_gemm",
     "ep_dispatch_experts", "ep_router", "local_params", "of_next_year"],
)  # fmt: skip
def test_unknown_style_is_refused_with_its_tensor(style: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        _shards(layer=style).slice("x.layer.weight", (12, 12))
    assert caught.value.message == (
        f"tensor 'x.layer.weight' has the tensor-parallel style {style!r},"
        " which wcache can not apply to the shape [12, 12]"
    )
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("x.layer.weight_scale_inv", (12, 12)),
        ("x.layer.weight", (12, 12, 12)),
        ("x.layer.weight", (12,)),
        ("x.layer.0.weight", (12, 12)),
        ("x.layer", (12, 12)),
    ],
)
def test_parameters_that_are_no_linear_layers_are_refused(
    name: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(CheckpointError, match="which wcache can not apply to the shape"):
        _shards(layer="colwise").slice(name, shape)


def test_a_module_without_a_rule_is_whole_on_every_rank() -> None:
    assert _shards(layer="colwise").slice("x.other.weight", (7, 7)) is None


def test_an_inner_rule_wins_over_an_outer_one() -> None:
    shards = replace(_shards(), rules={"x": "all_reduce", "x.layer": "colwise"})
    assert shards.slice("x.layer.weight", (6, 2)) == Slice(0, 0, 2)
    assert shards.slice("x.norm.weight", (6,)) is None


def test_a_dimension_that_tp_does_not_divide_is_refused_with_the_numbers() -> None:
    with pytest.raises(CheckpointError) as caught:
        _shards(tp=5, layer="rowwise").slice("x.layer.weight", (5, 12))
    assert caught.value.message == (
        "tp 5 does not divide dimension 1 of 'x.layer.weight', which has 12"
    )
    # Where no rule splits attention its heads say nothing.
    assert caught.value.hint == "use a tp that divides 12"


def test_tp_3_of_a_tied_llama(llama: Checkpoint) -> None:
    targets = _by_name(place(llama, Layout(tp=3), 1, parallel=LLAMA, tied=EMBEDDING))
    layer = "model.layers.1."
    expected: dict[str, tuple[tuple[int, ...], Slice | None]] = {
        layer + "self_attn.q_proj.weight": ((16, 48), Slice(0, 16, 32)),
        layer + "self_attn.k_proj.weight": ((8, 48), Slice(0, 8, 16)),
        layer + "self_attn.o_proj.weight": ((48, 16), Slice(1, 16, 32)),
        layer + "mlp.gate_proj.weight": ((32, 48), Slice(0, 32, 64)),
        layer + "mlp.down_proj.weight": ((48, 32), Slice(1, 32, 64)),
        layer + "input_layernorm.weight": ((48,), None),
        "model.norm.weight": ((48,), None),
        EMBEDDING: ((20, 48), Slice(0, 20, 40)),
        "lm_head.weight": ((20, 48), Slice(0, 20, 40)),
    }
    found = {name: (targets[name].shape, targets[name].slice) for name in expected}
    assert found == expected
    assert targets["lm_head.weight"].tied_to == EMBEDDING
    assert targets["lm_head.weight"].offset == targets[EMBEDDING].offset


@pytest.mark.parametrize(
    ("tp", "line", "hint"),
    [
        (2, "tp 2 would split a head: 3 key-value heads in 'model.layers.0.self_attn.k_proj"
            ".weight'", "tp can be 1, 3"),
        (6, "tp 6 would split a head: 3 key-value heads in 'model.layers.0.self_attn.k_proj"
            ".weight'", "tp can be 1, 3"),
        (4, "tp 4 would split a head: 3 key-value heads in 'model.layers.0.self_attn.k_proj"
            ".weight'", "tp can be 1, 3"),
        (7, "tp 7 does not divide dimension 0 of 'model.embed_tokens.weight', which has 60",
            "tp can be 1, 3"),
    ],
)  # fmt: skip
def test_tp_that_does_not_fit_is_refused(llama: Checkpoint, tp: int, line: str, hint: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        place(llama, Layout(tp=tp), 0, parallel=LLAMA, tied=EMBEDDING)
    assert (caught.value.message, caught.value.hint) == (line, hint)


def test_a_single_key_value_head_is_not_split(llama: Checkpoint) -> None:
    parallel = replace(LLAMA, kv_heads=(1,))
    with pytest.raises(CheckpointError, match=r"tp 3 would split a head: 1 key-value head in"):
        place(llama, Layout(tp=3), 0, parallel=parallel, tied=EMBEDDING)


def test_heads_that_differ_by_layer_are_all_looked_at(llama: Checkpoint) -> None:
    parallel = replace(LLAMA, attention_heads=(6, 4))
    with pytest.raises(CheckpointError, match=r"split a head: 4 attention heads in"):
        place(llama, Layout(tp=3), 0, parallel=parallel, tied=EMBEDDING)


def test_a_fused_projection_is_split_by_both_kinds_of_heads() -> None:
    shards = replace(_shards(2), rules={"x.self_attn.qkv_proj": "colwise"})
    with pytest.raises(CheckpointError, match="3 key-value heads"):
        shards.slice("x.self_attn.qkv_proj.weight", (12, 4))


def test_heads_do_not_matter_where_the_output_is_gathered() -> None:
    shards = replace(_shards(2), rules={"x.self_attn.qkv_proj": "colwise_gather_output"})
    assert shards.slice("x.self_attn.qkv_proj.weight", (6, 4)) == Slice(0, 0, 3)


def test_attention_of_unknown_heads_is_refused(llama: Checkpoint) -> None:
    parallel = replace(LLAMA, attention_heads=(), kv_heads=())
    with pytest.raises(CheckpointError, match=r"config\.json does not say how many key-value"):
        place(llama, Layout(tp=3), 0, parallel=parallel, tied=EMBEDDING)


def test_no_tensor_parallel_plan_is_said(llama: Checkpoint) -> None:
    with pytest.raises(CheckpointError) as caught:
        place(llama, Layout(tp=3), 0, parallel=replace(LLAMA, base={}))
    assert caught.value.message == (
        "tp 3: transformers has no tensor-parallel plan for LlamaForCausalLM"
    )


def test_a_plan_for_other_names_is_refused_instead_of_replicating(llama: Checkpoint) -> None:
    parallel = replace(LLAMA, base={**LLAMA.base, "layers.*.mlp.experts": "moe_tp_experts"})
    with pytest.raises(CheckpointError) as caught:
        place(llama, Layout(tp=3), 0, parallel=parallel)
    assert caught.value.message == (
        "the tensor-parallel plan of LlamaForCausalLM names model.layers.*.mlp.experts"
        " (moe_tp_experts), which the checkpoint does not have"
    )


def test_a_checkpoint_of_the_base_model_alone_is_sharded_too(tmp_path: Path) -> None:
    tensors = {name.removeprefix("model."): t for name, t in llama_tensors().items()}
    config = llama_config(architectures=["LlamaModel"])
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", tensors, config))
    targets = _by_name(place(checkpoint, Layout(tp=3), 2, parallel=replace(LLAMA, head={})))
    assert targets["layers.0.self_attn.q_proj.weight"].slice == Slice(0, 32, 48)
    assert targets["embed_tokens.weight"].slice == Slice(0, 40, 60)


@pytest.mark.parametrize(
    ("base", "head", "expected"),
    [
        ({}, {"lm_head": "colwise_rep"}, Slice(0, 0, 20)),
        ({"embed_tokens": "embedding_colwise"}, {}, Slice(1, 0, 16)),
        ({"embed_tokens": "embedding_rowwise"}, {"lm_head": "colwise"}, Slice(0, 0, 20)),
        ({"embed_tokens": "embedding_colwise"}, {"lm_head": "rowwise"}, Slice(1, 0, 16)),
        ({"embed_tokens": "replicate"}, {}, None),
    ],
)
def test_tied_tensors_are_cut_alike(
    llama: Checkpoint, base: dict[str, str], head: dict[str, str], expected: Slice | None
) -> None:
    parallel = replace(LLAMA, base={**LLAMA.base, **base}, head=head)
    targets = _by_name(place(llama, Layout(tp=3), 0, parallel=parallel, tied=EMBEDDING))
    assert targets[EMBEDDING].slice == targets["lm_head.weight"].slice == expected


def test_tied_tensors_that_would_be_cut_apart_are_refused(llama: Checkpoint) -> None:
    parallel = replace(LLAMA, base={**LLAMA.base, "embed_tokens": "embedding_colwise"})
    with pytest.raises(CheckpointError) as caught:
        place(llama, Layout(tp=3), 0, parallel=parallel, tied=EMBEDDING)
    assert caught.value.message == (
        "'lm_head.weight' (colwise_gather_output) is tied to 'model.embed_tokens.weight'"
        " (embedding_colwise), and the two are sharded along different dimensions"
    )


@pytest.mark.parametrize(
    ("layers", "pp", "expected"),
    [
        (8, 4, [2, 2, 2, 2]),
        (7, 3, [2, 3, 2]),
        (5, 3, [2, 2, 1]),
        (22, 4, [5, 6, 6, 5]),
        (3, 2, [2, 1]),
        (3, 3, [1, 1, 1]),
        (9, 5, [2, 2, 2, 2, 1]),
    ],
)
def test_layers_left_over_go_before_the_last_stage(
    layers: int, pp: int, expected: list[int]
) -> None:
    assert layers_per_stage(layers, pp) == expected


@given(layers=st.integers(1, 200), pp=st.integers(1, 16))
def test_every_layer_is_on_one_stage(layers: int, pp: int) -> None:
    counts = layers_per_stage(layers, pp)
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("tied", [EMBEDDING, None])
def test_a_pipeline_holds_every_tensor_once_but_a_tied_embedding(
    tmp_path: Path, tied: str | None
) -> None:
    path = write_llama(tmp_path / "m", num_hidden_layers=5, tie_word_embeddings=tied is not None)
    checkpoint = open_checkpoint(path)
    stages = [
        _by_name(place(checkpoint, Layout(pp=3), rank, parallel=LLAMA, tied=tied))
        for rank in range(3)
    ]
    layers = [
        sorted({int(name.split(".")[2]) for name in stage if name.startswith("model.layers.")})
        for stage in stages
    ]
    others = [{name for name in stage if ".layers." not in name} for stage in stages]
    assert layers == [[0, 1], [2, 3], [4]]
    last = {"model.norm.weight", "lm_head.weight"} | ({EMBEDDING} if tied else set())
    assert others == [{EMBEDDING}, set(), last]
    assert stages[2]["lm_head.weight"].tied_to == tied


def test_tp_and_pp_together(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_llama(tmp_path / "m"))
    targets = _by_name(place(checkpoint, Layout(tp=3, pp=2), 5, parallel=LLAMA, tied=EMBEDDING))
    assert targets["model.layers.1.mlp.up_proj.weight"].slice == Slice(0, 64, 96)
    assert not any(name.startswith("model.layers.0.") for name in targets)


@pytest.mark.parametrize(
    ("change", "pp", "line"),
    [
        ({"stages": ()}, 2, "pp 2: transformers has no pipeline-parallel plan for"),
        ({"stages": ("embed_tokens", "norm")}, 2, "pp 2: LlamaForCausalLM has 0 lists of layers"),
        ({}, 3, "pp 3: the model has 2 layers, too few for the stages"),
        ({"stages": ("embed_tokens", "layers")}, 2,
         "the pipeline-parallel plan does not say on which stage 'model.norm.weight' is"),
    ],
)  # fmt: skip
def test_a_pipeline_that_does_not_fit_is_refused(
    llama: Checkpoint, change: dict[str, tuple[str, ...]], pp: int, line: str
) -> None:
    parallel = replace(LLAMA, **change)  # type: ignore[arg-type]  # all of these are stages
    with pytest.raises(CheckpointError) as caught:
        place(llama, Layout(pp=pp), 0, parallel=parallel)
    assert caught.value.message.startswith(line)


def test_a_layer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    tensors = {n: t for n, t in llama_tensors(layers=3).items() if ".layers.1." not in n}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", tensors))
    with pytest.raises(CheckpointError, match=r"no tensor of layer model\.layers\.1"):
        place(checkpoint, Layout(pp=2), 0, parallel=LLAMA)


def test_experts_are_left_to_an_engine(llama: Checkpoint) -> None:
    with pytest.raises(CheckpointError) as caught:
        plan(llama, _config(llama.path, tp=2, ep=2), 0)
    assert caught.value.message == "ep 2: experts are placed by an engine's own loader"


def test_quantized_weights_can_not_be_converted(tmp_path: Path) -> None:
    path = write_qwen3(tmp_path / "m", fp8=True)
    with pytest.raises(CheckpointError, match=r"quantized with fp8 can not be converted to float1"):
        plan(open_checkpoint(path), _config(path, dtype="float16"), 0)


def _entry(dtype: str, *shape: int) -> TensorEntry:
    nbytes = prod(shape) * DTYPE_BYTES[dtype]
    return TensorEntry(file="f", dtype=dtype, shape=shape, start=0, nbytes=nbytes)


@pytest.mark.parametrize(
    ("stored", "kept"),
    [("F32", "BF16"), ("F64", "BF16"), ("F16", "BF16"), ("BF16", "BF16"), ("F8_E4M3", "F8_E4M3"),
     ("F8_E5M2", "F8_E5M2"), ("F8_E8M0", "F8_E8M0"), ("I64", "I64"), ("U8", "U8"),
     ("BOOL", "BOOL"), ("C64", "C64")],
)  # fmt: skip
def test_only_ordinary_floats_are_converted(llama: Checkpoint, stored: str, kept: str) -> None:
    checkpoint = replace(llama, tensors={"x": _entry(stored, 3)})
    (target,) = place(checkpoint, Layout(), 0, dtype="BF16").targets
    assert (target.dtype, target.nbytes) == (kept, 3 * DTYPE_BYTES[kept])


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(["U8", "BF16", "F64"]), st.lists(st.integers(0, 50), max_size=3)),
        min_size=1,
        max_size=20,
    )
)
def test_storages_are_aligned_and_apart(shapes: list[tuple[str, list[int]]]) -> None:
    parts = [
        Part(str(index), _entry(dtype, *shape), dtype)
        for index, (dtype, shape) in enumerate(shapes)
    ]
    planned = lay_out(parts)
    end = 0
    for target in planned.targets:
        assert target.offset % 256 == 0
        assert target.offset >= end
        end = target.offset + target.nbytes
    assert planned.total_bytes >= max(end, 1)
    assert planned.weight_bytes == sum(part.source.nbytes for part in parts)
