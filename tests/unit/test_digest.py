"""The digest sees every change that a damaged or exchanged weight could be."""

import logging
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wcache.errors import WcacheError
from wcache.memory import driver, mix_kernel, mixing
from wcache.memory.digest import Parts, digest, digests, finish
from wcache.memory.threads import in_threads

pytestmark = pytest.mark.unit

MASK = (1 << 64) - 1
DATA = st.binary(min_size=1, max_size=200)
CHUNK_BYTES = st.sampled_from([1, 8, 16, 24, 64, 1 << 20])


def run(data: bytes | bytearray) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def reference(data: bytes) -> str:
    """The definition in the module's docstring, in Python's unbounded integers."""

    def mix(x: int) -> int:
        x = (x ^ x >> 32) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ x >> 29) * 0x94D049BB133111EB & MASK
        return x ^ x >> 32

    total = len(data) * 0x7FB5D329728EA185
    for position, start in enumerate(range(0, len(data), 8)):
        word = int.from_bytes(data[start : start + 8].ljust(8, b"\0"), "little")
        total += mix(word + position * 0x9E3779B97F4A7C15 & MASK)
    return f"mix64:{mix(total & MASK):016x}"


@given(data=st.binary(max_size=200), chunk_bytes=CHUNK_BYTES)
def test_digest_is_what_its_definition_says(data: bytes, chunk_bytes: int) -> None:
    assert digest(run(data), chunk_bytes=chunk_bytes) == reference(data)


def test_digest_of_known_bytes_stays_what_it_was() -> None:
    """Manifests carry digests over upgrades: another value would make them all mismatches."""
    assert digest(run(b"")) == "mix64:0000000000000000"
    assert digest(run(bytes(range(100)))) == "mix64:fc6aaf4886c1bda7"


def test_chunk_size_does_not_change_the_digest_of_more_than_a_default_chunk() -> None:
    data = torch.arange(3 << 20, dtype=torch.int32).view(torch.uint8)[:-3]
    assert data.numel() > mixing._CPU_CHUNK_BYTES
    assert digest(data) == digest(data, chunk_bytes=1 << 30) == digest(data, chunk_bytes=96 << 10)


@given(data=DATA, chunk_bytes=CHUNK_BYTES, bits=st.data())
def test_one_flipped_bit_is_seen(data: bytes, chunk_bytes: int, bits: st.DataObject) -> None:
    bit = bits.draw(st.integers(0, len(data) * 8 - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert digest(run(flipped), chunk_bytes=chunk_bytes) != digest(run(data))


@given(data=DATA, bits=st.data())
def test_two_flipped_bits_are_seen(data: bytes, bits: st.DataObject) -> None:
    positions = st.integers(0, len(data) * 8 - 1)
    pair = bits.draw(st.lists(positions, min_size=2, max_size=2, unique=True))
    flipped = bytearray(data)
    for bit in pair:
        flipped[bit // 8] ^= 1 << bit % 8
    assert digest(run(flipped)) != digest(run(data))


def test_two_flipped_signs_are_seen_wherever_they_are() -> None:
    weights = torch.randn(4096, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = digest(weights.view(torch.uint8))
    for first, second in [(0, 1), (3, 7), (3, 4095), (0, 2048), (1023, 1027)]:
        changed = weights.clone()
        changed[[first, second]] *= -1
        assert digest(changed.view(torch.uint8)) != whole


def test_all_flipped_signs_are_seen() -> None:
    weights = torch.randn(4096, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert digest((-weights).view(torch.uint8)) != digest(weights.view(torch.uint8))


@given(words=st.lists(st.integers(0, MASK), min_size=2, max_size=40), places=st.data())
def test_swapped_words_are_seen(words: list[int], places: st.DataObject) -> None:
    index = st.integers(0, len(words) - 1)
    first, second = places.draw(index), places.draw(index)
    swapped = list(words)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    before, after = (
        digest(run(b"".join(word.to_bytes(8, "little") for word in version)))
        for version in (words, swapped)
    )
    assert (before == after) == (words == swapped)


def test_swapped_chunks_are_seen() -> None:
    data = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    swapped = torch.cat([data[1024:2048], data[:1024], data[2048:]])
    assert digest(swapped, chunk_bytes=1024) != digest(data, chunk_bytes=1024)


def test_transposed_rows_are_seen() -> None:
    weights = torch.randn(64, 64).bfloat16()
    exchanged = weights[[1, 0, *range(2, 64)]]
    whole = digest(weights.flatten().view(torch.uint8))
    assert digest(exchanged.flatten().view(torch.uint8)) != whole
    assert digest(weights.t().flatten().view(torch.uint8)) != whole


@given(data=st.binary(max_size=40), zeros=st.integers(1, 40))
def test_missing_zeros_at_the_end_are_seen(data: bytes, zeros: int) -> None:
    assert digest(run(data + bytes(zeros))) != digest(run(data))


@pytest.mark.parametrize("offset", range(1, 9))
def test_bytes_that_lie_on_no_word_have_the_same_digest(offset: int) -> None:
    data = torch.randint(0, 256, (1001,), dtype=torch.uint8)
    shifted = torch.cat([torch.zeros(offset, dtype=torch.uint8), data])[offset:]
    assert digest(shifted, chunk_bytes=64) == digest(data)


@given(data=st.binary(max_size=300), chunk_bytes=CHUNK_BYTES, cuts=st.data())
def test_spans_have_the_digests_of_what_lies_in_them(
    data: bytes, chunk_bytes: int, cuts: st.DataObject
) -> None:
    """Wherever they begin and end, in whatever order, and where they lie on each other."""
    places = st.integers(0, len(data))
    pairs = cuts.draw(st.lists(st.tuples(places, places).map(sorted), max_size=8))
    spans = [(begin, end - begin) for begin, end in pairs]
    expected = [reference(data[begin:end]) for begin, end in pairs]
    assert digests(run(data), spans, chunk_bytes=chunk_bytes) == expected
    assert digests(run(data), spans) == expected


@pytest.mark.parametrize(
    "span", [(-1, 5), (3, -1), (0, 101), (101, 0), (96, 5), (1 << 62, 1 << 62), (100, 1 << 63 - 1)]
)
def test_a_span_that_reaches_out_of_the_content_is_refused(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="a span"):
        digests(run(bytes(100)), [(0, 100), span, (100, 0)])


def _threads_recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []

    def recorded(count: int, work: Callable[[], object]) -> list[object]:
        counts.append(count)
        return in_threads(count, work)

    monkeypatch.setattr(mixing, "in_threads", recorded)
    return counts


def test_threads_that_share_the_work_come_to_the_same_digests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = (100_003, 0, 16, 70_000, 5, 65_536)
    data = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8)
    spans = [(sum(sizes[:n]), size) for n, size in enumerate(sizes)]
    alone = [reference(bytes(data[at : at + n].tolist())) for at, n in spans]
    threads_before = torch.get_num_threads()
    monkeypatch.setattr(mixing, "_TASK_BYTES", 4096)
    counts = _threads_recorded(monkeypatch)
    try:
        torch.set_num_threads(3)
        assert digests(data, spans) == alone
    finally:
        torch.set_num_threads(threads_before)
    assert counts == [3]


def test_operations_stay_in_the_thread_that_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone in its thread, or small enough for torch not to spread it over its own threads."""
    seen: set[tuple[bool, int]] = set()
    mixed = mixing.Workspace._mixed

    def watched(self: mixing.Workspace, words: torch.Tensor, first: int) -> torch.Tensor:
        seen.add((torch.get_num_threads() == 1, words.numel()))
        return mixed(self, words, first)

    monkeypatch.setattr(mixing.Workspace, "_mixed", watched)
    threads_before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        digests(torch.zeros(32 << 20, dtype=torch.uint8), [(0, 32 << 20)])
        assert seen == {(True, mixing._CPU_CHUNK_BYTES // 8)}
        seen.clear()
        digest(torch.zeros(4 << 20, dtype=torch.uint8))
    finally:
        torch.set_num_threads(threads_before)
    assert len(seen) == 2  # whole chunks, and what is left of them
    assert all(not is_alone and words < 32_768 for is_alone, words in seen)


@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 37), max_size=5))
def test_parts_in_any_order_add_up_to_the_digest(data: bytes, cuts: list[int]) -> None:
    ends = [*sorted({cut * 8 for cut in cuts if cut * 8 < len(data)}), len(data)]
    starts = [0, *ends[:-1]]
    thread = Parts()
    parts = [thread.sum(run(data[a:b]), a) for a, b in zip(starts, ends, strict=True)]
    assert finish(sum(reversed(parts)), len(data)) == reference(data)


@pytest.mark.parametrize("offset", [-8, 1, 12])
def test_a_part_that_begins_within_a_word_is_refused(offset: int) -> None:
    with pytest.raises(ValueError, match="does not begin with a word"):
        Parts().sum(run(b"content"), offset)


def test_a_kernel_that_can_not_be_compiled_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def refuse(source: str, name: str, ordinal: int) -> int:
        tries.append(ordinal)
        raise WcacheError("there is no NVRTC on this machine")

    monkeypatch.setattr(driver, "compile_kernel", refuse)
    mix_kernel.compiled.cache_clear()
    try:
        with caplog.at_level(logging.DEBUG, mix_kernel.__name__):
            assert [mix_kernel.compiled(7), mix_kernel.compiled(7)] == [None, None]
    finally:
        mix_kernel.compiled.cache_clear()
    assert tries == [7]
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert "no NVRTC" in caplog.text


def test_the_bytes_are_left_as_they_are() -> None:
    data = torch.arange(256).to(torch.uint8)
    digest(data)
    assert torch.equal(data, torch.arange(256).to(torch.uint8))


@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(4),
        torch.zeros(4, 4, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.uint8)[::2],
    ],
    ids=["dtype", "shape", "stride"],
)
def test_what_is_no_run_of_bytes_is_refused(data: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous uint8"):
        digest(data)
