"""Reading a checkpoint's folder, and what tells two checkpoints apart."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.checkpoints import (
    llama_config,
    llama_tensors,
    raw_file,
    write_checkpoint,
    write_index,
    write_llama,
)
from wcache.checkpoint import diff, identify, open_checkpoint
from wcache.checkpoint.ties import tied_embedding
from wcache.errors import CheckpointError

pytestmark = pytest.mark.unit


def test_every_tensor_is_where_safetensors_finds_it(tmp_path: Path) -> None:
    tensors = llama_tensors()
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", tensors, shards=3))

    assert checkpoint.tensors.keys() == tensors.keys()
    assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    for name, entry in checkpoint.tensors.items():
        with (checkpoint.path / entry.file).open("rb") as file:
            file.seek(entry.start)
            data = file.read(entry.nbytes)
        with safe_open(checkpoint.path / entry.file, "pt") as opened:
            expected = opened.get_tensor(name)
        found = torch.frombuffer(bytearray(data), dtype=expected.dtype).reshape(entry.shape)
        assert torch.equal(found, expected)


def test_tensors_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", llama_tensors(), shards=2))
    places = [(entry.file, entry.start) for entry in checkpoint.tensors.values()]
    assert places == sorted(places)


def test_scalars_and_empty_tensors_are_tensors(tmp_path: Path) -> None:
    tensors = {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "one": torch.ones(2)}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", tensors))
    shapes = {name: entry.shape for name, entry in checkpoint.tensors.items()}
    assert shapes == {"scalar": (), "empty": (0, 4), "one": (2,)}


def test_the_config_is_typed_and_whole(tmp_path: Path) -> None:
    config = open_checkpoint(write_llama(tmp_path / "m", dtype="torch.float16")).config
    assert config.architecture == "LlamaForCausalLM"
    assert config.dtype == "float16"
    assert config.tie_word_embeddings is True
    assert config.quantization_config is None
    assert config.raw["hidden_size"] == 48


def test_settings_beside_config_json_are_read(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m")
    assert open_checkpoint(path).quantization_files == {}
    (path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert open_checkpoint(path).quantization_files == {
        "hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}
    }


def test_tensors_that_the_index_does_not_name_are_passed_over(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m", {"a": torch.ones(4), "b": torch.zeros(4)}, shards=2)
    save_file(
        {"b": torch.zeros(4), "stale": torch.ones(9)}, path / "model-00002-of-00002.safetensors"
    )
    assert set(open_checkpoint(path).tensors) == {"a", "b"}


def test_a_tensor_comes_from_the_file_that_the_index_names(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_checkpoint(path, {"a": torch.ones(4)}, shards=1)
    (path / "model.safetensors").unlink()
    save_file({"a": torch.ones(4), "b": torch.ones(1)}, path / "x.safetensors")
    save_file({"a": torch.zeros(4), "c": torch.ones(1)}, path / "y.safetensors")
    write_index(path, {"a": "y.safetensors", "b": "x.safetensors"})
    assert open_checkpoint(path).tensors["a"].file == "y.safetensors"


def test_files_may_be_links_into_a_hub_cache(tmp_path: Path) -> None:
    blobs = write_llama(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert open_checkpoint(snapshot).tensors == open_checkpoint(blobs).tensors


def test_padding_behind_the_header_is_taken(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}) + "   "
    path = write_llama(tmp_path / "m")
    (path / "model.safetensors").write_bytes(raw_file(header.encode(), b"xy"))
    assert open_checkpoint(path).tensors["a"].nbytes == 2


def test_identity_is_stable_over_copies_that_keep_times(tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path / "one", llama_tensors(), shards=2)
    other = write_checkpoint(tmp_path / "other", llama_tensors(), shards=2)
    assert identify(open_checkpoint(one)) == identify(open_checkpoint(other))


def test_rows_that_no_sample_shows_are_told_by_the_files_time(tmp_path: Path) -> None:
    """A doubt is a mismatch: a file that was written again is another one until it is read."""
    path = write_llama(tmp_path / "m")
    before = identify(open_checkpoint(path))
    os.utime(path / "model.safetensors")
    after = identify(open_checkpoint(path))
    assert before.digest != after.digest
    assert diff(before.shards, after.shards) == ("model.safetensors",)


def test_a_fine_tune_of_the_same_layout_is_another_model(tmp_path: Path) -> None:
    tensors = llama_tensors()
    base = identify(open_checkpoint(write_checkpoint(tmp_path / "a", tensors, shards=2)))
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    tuned = identify(open_checkpoint(write_checkpoint(tmp_path / "b", tensors, shards=2)))

    assert base.digest != tuned.digest
    assert [shard.header for shard in base.shards] == [shard.header for shard in tuned.shards]
    assert len(diff(base.shards, tuned.shards)) == 1


def test_an_edit_outside_of_every_sample_is_told_by_the_files_time(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m", {"w": torch.zeros(40_000, dtype=torch.uint8)})
    before = identify(open_checkpoint(path))
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert identify(open_checkpoint(path)).digest != before.digest


def test_a_copy_with_other_times_is_another_checkpoint_until_it_is_read(tmp_path: Path) -> None:
    """Its samples are the same and the rest may be: a doubt is a mismatch."""
    one = identify(open_checkpoint(write_llama(tmp_path / "a")))
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=shutil.copyfile)
    shutil.copytree(tmp_path / "a", tmp_path / "c", copy_function=shutil.copy2)
    assert identify(open_checkpoint(tmp_path / "b")).digest != one.digest
    assert identify(open_checkpoint(tmp_path / "c")) == one


def test_files_are_sampled_side_by_side_to_the_same_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", llama_tensors(), shards=9))
    together = identify(checkpoint)
    monkeypatch.setattr("wcache.checkpoint.identity._AT_ONCE", 1)
    assert identify(checkpoint) == together


def test_the_kernel_is_not_asked_to_read_ahead_for_an_empty_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A length of 0 would mean the rest of the file."""
    asked: list[int] = []

    def advise(*arguments: int) -> None:
        asked.append(arguments[2])

    monkeypatch.setattr(os, "posix_fadvise", advise)
    tensors = {"empty": torch.empty(0, 4), "one": torch.ones(2)}
    identify(open_checkpoint(write_checkpoint(tmp_path / "m", tensors)))
    assert asked == [8]


def test_a_file_system_that_takes_no_advice_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(write_llama(tmp_path / "m"))
    expected = identify(checkpoint)

    def refuse(*_: int) -> None:
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    assert identify(checkpoint) == expected


def test_the_sample_is_from_the_middle_of_a_large_tensor(tmp_path: Path) -> None:
    tensor = torch.zeros(40_000, dtype=torch.uint8)
    base = identify(open_checkpoint(write_checkpoint(tmp_path / "a", {"w": tensor})))
    tensor[20_000] = 1
    middle = identify(open_checkpoint(write_checkpoint(tmp_path / "b", {"w": tensor})))
    assert base.digest != middle.digest


def test_another_config_is_another_model(tmp_path: Path) -> None:
    one = identify(open_checkpoint(write_llama(tmp_path / "a")))
    other = identify(open_checkpoint(write_llama(tmp_path / "b", rope_theta=7.0)))
    assert one.digest != other.digest
    assert diff(one.shards, other.shards) == ()


def test_diff_names_shards_that_one_side_lacks(tmp_path: Path) -> None:
    two = identify(open_checkpoint(write_checkpoint(tmp_path / "a", llama_tensors(), shards=2)))
    assert diff(two.shards, two.shards[:1]) == (two.shards[1].name,)


def test_a_file_that_was_replaced_after_its_header_was_read_is_refused(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m")
    checkpoint = open_checkpoint(path)
    file = path / "model.safetensors"
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data)
    os.utime(file, ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"model\.safetensors changed while it was read"):
        identify(checkpoint)


@pytest.mark.parametrize(
    ("tied", "head", "expected"),
    [
        (True, None, True),
        (None, None, True),
        (False, None, False),
        (True, "equal", True),
        (True, "other", False),
        (None, "equal", False),
        (False, "equal", False),
    ],
)
def test_head_and_embedding_are_tied(
    tmp_path: Path, tied: bool | None, head: str | None, expected: bool
) -> None:
    tensors = llama_tensors()
    embedding = tensors["model.embed_tokens.weight"]
    if head is not None:
        tensors["lm_head.weight"] = embedding.clone() if head == "equal" else embedding + 1
    config = llama_config(tie_word_embeddings=tied)
    if tied is None:
        del config["tie_word_embeddings"]
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", tensors, config))
    assert tied_embedding(checkpoint) == ("model.embed_tokens.weight" if expected else None)


def test_a_model_without_a_head_has_none_tied(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m", architectures=["LlamaModel"])
    assert tied_embedding(open_checkpoint(path)) is None
