"""Which rank a process takes, and when several processes are not the layout that is cached."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import write_llama
from tests.places import Places
from wcache.checkpoint import open_checkpoint
from wcache.config import Config, LayoutSection, ModelSection
from wcache.engines.transformers.disk import Disk
from wcache.engines.transformers.place import Place, _leave_gloo
from wcache.errors import MismatchError, UsageError
from wcache.fingerprint import Fingerprint

pytestmark = pytest.mark.unit


def held(tp: int = 1, tp_rank: int = 0, dp: int | None = None) -> Fingerprint:
    return Fingerprint(tp_size=tp, tp_rank=tp_rank, dp_size=dp)


@pytest.mark.parametrize(
    ("environment", "named", "rank", "is_joint"),
    [
        ({}, None, 0, False),
        ({}, 5, 5, False),
        ({"WCACHE_RANK": "2"}, None, 2, False),
        ({"RANK": "1", "WORLD_SIZE": "3"}, None, 1, True),
        ({"RANK": "1", "WORLD_SIZE": "3"}, 0, 0, False),
        ({"RANK": "1", "WORLD_SIZE": "3", "WCACHE_RANK": "0"}, None, 0, False),
        # What is left in an environment is no group.
        ({"RANK": "1", "WORLD_SIZE": "1"}, None, 0, False),
        ({"RANK": "1"}, None, 0, False),
    ],
)
def test_rank_is_the_named_one_or_that_of_the_process(
    environment: dict[str, str], named: int | None, rank: int, is_joint: bool
) -> None:
    place = Place.here(named, environment)
    assert (place.cached_rank, place.is_joint) == (rank, is_joint)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is not a number: 'two'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is not a number: '-1'"),
        ({"WCACHE_RANK": "x"}, "WCACHE_RANK is not a number: 'x'"),
        ({"WORLD_SIZE": "2"}, "RANK does not say which process this is"),
    ],
)
def test_an_environment_that_says_nothing_is_named(environment: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        Place.here(None, environment)
    assert said in raised.value.message


@pytest.mark.parametrize(
    ("place", "found"),
    [
        (Place(), held()),
        (Place(number=2, size=3), held(3, 2)),
        # Replicas of a model, each in two shards.
        (Place(number=3, size=4), held(2, 1, dp=2)),
        (Place(number=3, size=4), held(1, 0, dp=4)),
        # One copy that all processes were told to share.
        (Place(number=3, size=4, rank=0), held()),
        (Place(number=1, size=2, rank=1), held(2, 1)),
    ],
)
def test_a_layout_that_fits_is_taken(place: Place, found: Fingerprint) -> None:
    place.check(found)


@pytest.mark.parametrize(
    ("place", "found", "said", "hint"),
    [
        (Place(), held(3), "tp_size: cached 3, wanted 1", "torchrun --nproc-per-node 3"),
        (Place(number=1, size=2), held(3, 1),
         "rank 1 holds other weights: tp_size: cached 3, wanted 2 (WORLD_SIZE is 2)",
         "start 3 processes"),
        (Place(number=0, size=2), held(), "tp_size: cached 1, wanted 2", "from_cache(rank=…)"),
        (Place(number=0, size=2, rank=1), held(2, 1), "tp_rank: cached 1, wanted 0 (RANK is 0)",
         "let from_cache() find the rank"),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_fit_is_a_mismatch_of_a_field(
    place: Place, found: Fingerprint, said: str, hint: str
) -> None:
    with pytest.raises(MismatchError) as raised:
        place.check(found)
    assert said in raised.value.message
    assert hint in raised.value.hint


@pytest.mark.parametrize(
    ("environment", "number", "beside"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1, 2),
        ({"RANK": "1", "WORLD_SIZE": "4"}, 1, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 0, 1),  # what is left in an environment
    ],
)
def test_processes_of_this_machine_are_counted(
    environment: dict[str, str], number: int, beside: int
) -> None:
    place = Place.here(None, environment)
    assert (place.local_number, place.local_size) == (number, beside)


@pytest.mark.parametrize(
    ("place", "chosen", "index"),
    [
        # The second node of two, with more GPUs than processes.
        (Place(number=5, size=8, local_number=1, local_size=4), 0, 1),
        (Place(number=5, size=8, local_number=1, local_size=4), 6, 6),
        (Place(number=9, size=10, local_number=9), 0, 1),
        (Place(), 3, 3),
        (Place(number=1, size=2, local_number=1, rank=0), 0, 0),
    ],
)
def test_the_disk_is_read_to_the_gpu_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
    places: Places,
    tmp_path: Path,
    place: Place,
    chosen: int,
    index: int,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen)
    model = write_llama(tmp_path / "model")
    assert Disk.of(model, "", place, None).device == torch.device("cuda", index)


def test_one_process_needs_no_group_and_agrees_with_itself() -> None:
    place = Place()
    assert place.group(1, torch.device("cpu")).size == 1
    problem = UsageError("no")
    assert place.agree(problem) is problem
    assert place.agree(None, held()) is None


@pytest.mark.parametrize(
    ("layout", "place", "shards", "readers"),
    [
        # Each pair of processes is a model of its own, with its own prompts.
        (LayoutSection(tp=2, dp=2), Place(number=3, size=4, local_size=4), 2, 4),
        (LayoutSection(tp=1, dp=4), Place(number=3, size=4, local_size=4), 1, 4),
        (LayoutSection(tp=3), Place(number=3, size=4, local_size=2), 4, 2),
        (LayoutSection(tp=2), Place(), 1, 1),
    ],
)
def test_the_disk_is_read_in_the_layout_that_the_cache_would_have(
    places: Places, tmp_path: Path, layout: LayoutSection, place: Place, shards: int, readers: int
) -> None:
    """By what is read into this machine's memory."""
    model = write_llama(tmp_path / "model")
    places.write_config(Config(model=ModelSection(path=str(model)), layout=layout))
    total = open_checkpoint(model).total_bytes
    assert Disk.of(None, "", place, "cpu").nbytes == total * readers // shards


@pytest.mark.parametrize(
    ("place", "chosen", "gpu"),
    [
        (Place(number=3, size=4, local_number=1, local_size=2), 0, 1),
        (Place(number=3, size=4, local_number=3, local_size=4), 0, 1),  # of two that it sees
        (Place(number=1, size=2, local_number=1, local_size=2), 1, 1),
        (Place(number=2, size=3, local_number=2, local_size=3, rank=0), 0, 0),
        (Place(), 0, 0),
    ],
)
def test_each_process_has_a_gpu_of_its_own_unless_it_has_chosen(
    monkeypatch: pytest.MonkeyPatch, place: Place, chosen: int, gpu: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen)
    assert place.gpu == gpu


@pytest.mark.parametrize(
    ("backends", "left"), [("cpu:gloo,cuda:nccl", 0), ("cuda:nccl", 0), ("cpu:gloo,cuda:gloo", 1)]
)
def test_a_group_that_could_wait_for_others_is_not_left_at_the_end(
    monkeypatch: pytest.MonkeyPatch, backends: str, left: int
) -> None:
    done: list[None] = []
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda: backends)
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: done.append(None))
    _leave_gloo()
    assert len(done) == left
