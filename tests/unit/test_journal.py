"""Entries of the journal, whoever wrote them, as lines."""

import json

import pytest

from wcache.supervise.systemd.journal import LogLine, log_line

pytestmark = pytest.mark.unit


def line(**fields: object) -> LogLine | None:
    entry = {"__REALTIME_TIMESTAMP": "1700000000123456", "PRIORITY": "3", "MESSAGE": "said"}
    return log_line(json.dumps(entry | fields).encode(), "wcache@", "wcache-load@")


def told(**fields: object) -> LogLine:
    found = line(**fields)
    assert found is not None
    return found


def test_a_line_says_who_wrote_it_when_and_how_bad_it_is() -> None:
    found = told(_SYSTEMD_UNIT="wcache@draft:3.service")
    assert (found.label, found.level, found.text) == ("daemon[draft:3]", "ERROR", "said")
    assert found.when == pytest.approx(1700000000.123456)
    assert str(found)[19:] == ",123 ERROR said"
    assert told(_SYSTEMD_UNIT="wcache-load@3.service").label == "loader[3]"


def test_a_line_knows_its_process_its_unit_and_which_start_of_it_that_was() -> None:
    found = told(_SYSTEMD_UNIT="wcache@3.service", _PID="77", _SYSTEMD_INVOCATION_ID="ab")
    assert (found.pid, found.unit, found.invocation) == (77, "wcache@3.service", "ab")
    # Of what systemd says, the invocation is that of the unit and not systemd's own.
    about = {"UNIT": "wcache@3.service", "_SYSTEMD_INVOCATION_ID": "own", "INVOCATION_ID": "cd"}
    found = told(_SYSTEMD_UNIT="init.scope", **about)
    assert (found.unit, found.invocation) == ("wcache@3.service", "cd")
    user = {"USER_UNIT": "wcache@3.service", "USER_INVOCATION_ID": "ef"}
    assert told(_SYSTEMD_UNIT="user@1.service", **user).invocation == "ef"
    assert (told(_SYSTEMD_UNIT="wcache@3.service", _PID="x").pid, found.pid) == (None, None)


def test_what_systemd_says_of_a_unit_is_systemds() -> None:
    assert told(_SYSTEMD_UNIT="init.scope", UNIT="wcache@3.service").label == "systemd[3]"
    user = {"_SYSTEMD_UNIT": "user@1000.service", "USER_UNIT": "wcache-load@3.service"}
    assert told(**user).label == "systemd[3]"


def test_units_of_a_user_manager_are_known_by_their_own_field() -> None:
    found = told(_SYSTEMD_UNIT="user@1000.service", _SYSTEMD_USER_UNIT="wcache@3.service")
    assert found.label == "daemon[3]"


@pytest.mark.parametrize(
    ("message", "text"),
    [([104, 255, 105], "h\ufffdi"), (None, "(no text)"), ([1, "x"], "(no text)"),
     ([300], "(no text)"), ({"a": 1}, "(no text)")],
)  # fmt: skip
def test_a_message_that_is_no_text(message: object, text: str) -> None:
    assert told(_SYSTEMD_UNIT="wcache@3.service", MESSAGE=message).text == text


@pytest.mark.parametrize("priority", ["", "9", "x"])
def test_a_level_that_is_none_is_information(priority: str) -> None:
    assert told(_SYSTEMD_UNIT="wcache@3.service", PRIORITY=priority).level == "INFO"


def test_entries_of_others_and_garbage_are_passed_over() -> None:
    assert line(_SYSTEMD_UNIT="ssh.service") is None
    assert line() is None
    assert log_line(b"", "wcache@", "wcache-load@") is None
    assert log_line(b"[1]", "wcache@", "wcache-load@") is None
    assert log_line(b'{"PRIORITY": 3}', "wcache@", "wcache-load@") is None
