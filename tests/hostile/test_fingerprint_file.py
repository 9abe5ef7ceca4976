"""A file that is given as a fingerprint and is none: a line that says why, and no more."""

import os
from pathlib import Path

import pytest

from wcache.commands.sources import of_file
from wcache.errors import ExitCode, WcacheError

pytestmark = pytest.mark.hostile


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b"{}", "it names no model"),
        (b"\xff", "is not UTF-8"),
        (b'{"model": "a", "model": "b"}', "has the key 'model' twice"),
        (b'{"model": 7}', "Expected `str | null`, got `int`"),
        (b'{"model": "a", "tp_size": "two"}', "Expected `int | null`, got `str`"),
        (b'{"model": "a", "switches": ["x"]}', "Expected `object | null`, got `array`"),
        (b'{"model": "a", "switches": {"x": 1}}', "Expected `str`, got `int`"),
        (b'{"model": "a", "colour": "red"}', "this wcache knows no field 'colour'"),
        (b'{"model": "a", "tp_size": NaN}', "is not JSON"),
        (b'{"model": ' + b"[" * 100_000, "is nested too deeply"),
        (b'{"tp_size": ' + b"1" * 100_000 + b"}", "a number is too long"),
        (b" " * ((1 << 20) + 1), "has 1048577 bytes, at most 1048576 are taken"),
    ],
)
def test_what_is_no_fingerprint_is_refused_in_a_line(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    file = tmp_path / "fingerprint.json"
    file.write_bytes(content)
    with pytest.raises(WcacheError) as caught:
        of_file(file)
    assert caught.value.message.startswith(f"no fingerprint: {file}")
    assert reason in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < len(str(file)) + 200
    assert caught.value.exit_code is ExitCode.CONFIGURATION


def test_a_file_without_end_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "fingerprint.json"
    file.touch()
    os.truncate(file, 1 << 40)
    with pytest.raises(WcacheError, match="at most 1048576 are taken"):
        of_file(file)


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(WcacheError, match="is not a regular file"):
        of_file(tmp_path / "fifo")
