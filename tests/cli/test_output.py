"""Tables, sizes, lines and bars: what reaches a pipe and what reaches a person."""

import msgspec
import pytest

from wcache import progress
from wcache.commands.options import parse_size
from wcache.errors import UsageError
from wcache.output import Output, Table, counted, one_line
from wcache.progress import LiveBars, PlainBars, Speed
from wcache.units import GIB, MIB

pytestmark = pytest.mark.cli


class Data(msgspec.Struct):
    number: int
    text: str | None = None


def table() -> Table:
    made = Table("NAME", ">SIZE", "SAID")
    made.add("a", 10, "x" * 300)
    made.add("long name", None, "")
    return made


def test_a_piped_table_is_aligned_and_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    Output().data(Data(1), table())
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["NAME       SIZE  SAID", "a            10  " + "x" * 300, "long name     -"]


def test_a_narrow_terminal_has_the_sentence_of_a_row_below_it() -> None:
    made = Table("RANK", ">SIZE", "STATUS")
    made.add(9, "8.1 MiB", "serving generation 1: 8.1 MiB in 46 tensors")
    made.add(10, "24.0 MiB", None)
    made.add(11, "-", "to read it: wcache warm --page-cache")
    assert made.stacked(30) == [
        "RANK      SIZE",
        "    STATUS",
        "9      8.1 MiB",
        "    serving generation 1: 8.1",
        "    MiB in 46 tensors",
        "10    24.0 MiB",
        "11           -",
        "    to read it: wcache warm",
        "    --page-cache",
    ]


def test_a_narrower_one_has_less_between_columns() -> None:
    made = Table("RANK", "STATE", ">FDS", "STATUS")
    made.add(10, "ready", "45/45", "serving generation 2")
    assert made.stacked(17) == [
        "RANK STATE   FDS",
        "    STATUS",
        "10   ready 45/45",
        "    serving",
        "    generation 2",
    ]


def test_a_narrow_terminal_that_has_room_shows_rows_as_they_are() -> None:
    made = Table("RANK", "STATUS")
    made.add(10, "ready")
    assert made.stacked(12) == made.lines() == ["RANK  STATUS", "10    ready"]


def test_json_goes_out_instead_of_tables(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=True).data(Data(1), table())
    out = capsys.readouterr()
    assert msgspec.json.decode(out.out, type=Data) == Data(1)
    assert "NAME" not in out.out
    assert out.err == ""


def test_talk_goes_to_stderr_and_a_quiet_command_keeps_its_warnings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for quiet in (False, True):
        out = Output(quiet=quiet)
        out.say("said")
        out.warn("warned")
        out.error("failed")
        got = capsys.readouterr()
        assert got.out == ""
        assert got.err.splitlines() == ["said"] * (not quiet) + ["warning: warned", "error: failed"]


def test_commands_that_are_told_name_the_instance(capsys: pytest.CaptureFixture[str]) -> None:
    """Pasted without it, this one would free the default one's weights."""
    out = Output(instance="draft")
    out.say("loading goes on: wcache down ends it")
    out.warn("wcache down frees it")
    out.hint("wcache down")
    told = capsys.readouterr().err
    assert told.count("wcache down") == told.count("wcache down --instance draft") == 3


def test_an_empty_table_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    Output().data(Data(1), Table("A"), Table("B"))
    assert capsys.readouterr().out == ""


def test_a_peers_command_line_can_not_drive_the_terminal() -> None:
    text = one_line("a\x1b[2J\x07\nb\t c\u2028d\x9b0m", 100)
    assert text.isprintable()
    assert text == "a [2J b c d 0m"
    made = Table("COMMAND")
    made.add("evil\x1b]0;title\x07\nrow")
    assert made.lines()[1].isprintable()


def test_a_long_line_is_cut_where_it_is_said() -> None:
    assert one_line("x" * 10, 10) == "x" * 10
    assert one_line("x" * 11, 10) == "x" * 9 + "…"


def test_counting_knows_the_singular() -> None:
    assert [counted(number, "slab") for number in (0, 1, 2)] == ["0 slabs", "1 slab", "2 slabs"]


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1GiB", GIB), ("512MiB", 512 * MIB), ("2097152", 2 * MIB), ("3 GiB", 0),
                         ("1G", 0), ("1gib", 0), ("", 0), ("0", 0), ("-1", 0), ("1e9", 0)]
)  # fmt: skip
def test_sizes_say_their_unit(text: str, nbytes: int) -> None:
    if nbytes:
        assert parse_size(text) == nbytes
    else:
        with pytest.raises(UsageError, match="not a size"):
            parse_size(text)


def test_speed_is_that_of_the_phase() -> None:
    speed = Speed()
    speed.see("read", 0, 10.0)
    assert speed.sentence(100) == ""
    speed.see("read", 2_000_000_000, 11.0)
    assert speed.sentence(10_000_000_000) == "2.00 GB/s, 4.0 s left"
    speed.see("digest", 0, 12.0)
    assert speed.remaining_s(100) is None


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_a_log_gets_a_line_a_change_and_one_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    with PlainBars(["rank 0", "rank 1"]) as bars:
        for second in range(13):
            clock.now = 100.0 + second
            bars.step("rank 0", "read", second * GIB, 20 * GIB)
            bars.step("rank 1", "waiting", 0, 0)
        bars.end("rank 0", "ready")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "rank 0: read 20.0 GiB",
        "rank 1: waiting",
        "rank 0: read 5.0 GiB of 20.0 GiB (25 %), 1.07 GB/s, 15 s left",
        "rank 0: read 10.0 GiB of 20.0 GiB (50 %), 1.07 GB/s, 10 s left",
        "rank 0: ready",
    ]


@pytest.mark.parametrize("columns", [120, 80, 40])
def test_bars_name_their_rank_on_a_terminal_of_any_width(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    labels = [f"rank {rank}" for rank in range(12)]
    with LiveBars(labels) as bars:
        bars.end(
            "rank 3", "rank 3 needs 131.0 GiB of memory, GPU-1 has 4.0 GiB free: " + 9 * "more "
        )
        bars.step("rank 11", "waiting for engines to give them back", 0, 0)
    lines = capsys.readouterr().err.splitlines()
    assert [line[:7].rstrip() for line in lines] == labels
    assert max(map(len, lines)) <= columns
    assert lines[3].endswith("…")
    assert ("give them back" in lines[11]) == (columns >= 80)


def test_brackets_in_what_bars_say_are_no_markup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with LiveBars(["rank 0"]) as bars:
        bars.end("rank 0", "no such file: [/models/x]")
    assert "no such file: [/models/x]" in capsys.readouterr().err


def test_no_bars_at_all_are_drawn_too(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveBars([]):
        pass
    assert capsys.readouterr().err.strip() == ""


def test_a_quiet_command_draws_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Output(quiet=True).bars(["rank 0"]) as bars:
        bars.step("rank 0", "read", 1, 2)
        bars.end("rank 0", "ready")
    assert capsys.readouterr().err == ""
