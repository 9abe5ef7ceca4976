"""What becomes of an engine's output on its way through ``wcache run``."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from wcache.run.lines import Passage

pytestmark = pytest.mark.unit


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(writer)


@pytest.mark.parametrize("name", ["/dev/full", "a pipe without a reader", "a closed descriptor"])
def test_an_output_that_takes_nothing_more_does_not_stop_the_engine(
    pipe: tuple[int, int], name: str
) -> None:
    source, engine = pipe
    lines: list[str] = []
    if name.startswith("/"):
        out = os.open(name, os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    passage = Passage(source, out, lines.append)
    if name == "a closed descriptor":
        os.close(out)
    os.write(engine, b"one\ntwo\nthr")
    assert passage.pass_on()
    os.write(engine, b"ee\n")
    assert passage.pass_on()
    assert lines == ["one", "two", "three"]
    passage.close()
    if name != "a closed descriptor":
        os.close(out)


def test_nothing_is_lost_on_a_pipe_that_somebody_made_non_blocking(tmp_path: Path) -> None:
    data = b"".join(b"%d\n" % number for number in range(100_000))
    (tmp_path / "said").write_bytes(data)
    reader, out = os.pipe()
    os.set_blocking(out, False)
    if not (child := os.fork()):
        os.close(out)
        got = b""
        while chunk := os.read(reader, 1 << 16):
            got += chunk
        os._exit(got != data)
    os.close(reader)
    lines: list[str] = []
    passage = Passage(os.open(tmp_path / "said", os.O_RDONLY), out, lines.append)
    while passage.pass_on():
        pass
    os.close(out)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
