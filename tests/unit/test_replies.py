"""What a daemon of another wcache says is read as far as it can be, and else named."""

from typing import Any

import msgspec
import pytest

import wcache
from tests.cli.views import config, report
from wcache.errors import ProtocolError
from wcache.fingerprint import held_from, wanted_by
from wcache.protocol.messages import MAX_FRAME_BYTES, Attached, Refused, Report
from wcache.protocol.replies import decode_reply, is_unknown

pytestmark = pytest.mark.unit


def said(message: msgspec.Struct) -> Any:
    """``message`` as plain data, to be changed as another wcache would say it."""
    return msgspec.json.decode(msgspec.json.encode(message))


def read(message: object) -> object:
    return decode_reply(msgspec.json.encode(message))


def a_report(**fields: Any) -> Any:
    wanted = config()
    held = held_from(wanted, 0, architecture="Llama", content="sha256:" + "a" * 64)
    made = said(report(held=held, wanted=wanted, **fields))
    made["generations"][0]["config"] = said(wanted)
    return made


def test_a_report_is_read_whole_where_both_are_of_one_wcache() -> None:
    found = read(a_report())
    assert isinstance(found, Report)
    assert found.generations[0].config == config()
    assert found.wanted == wanted_by(config(), 0)


def test_what_a_later_wcache_adds_to_a_report_is_passed_over() -> None:
    later = a_report()
    later["weather"] = later["generations"][0]["weather"] = {"sun": [1]}
    assert read(later) == read(a_report())


def test_what_an_earlier_wcache_leaves_out_of_a_report_is_not_missed() -> None:
    earlier = a_report()
    for name in ("renewing", "reclaiming", "staging", "freed", "progress", "problems"):
        del earlier[name]
    for name in ("role", "config"):
        del earlier["generations"][0][name]
    found = read(earlier)
    assert isinstance(found, Report)
    assert (found.renewing, found.generations[0].config) == ((), None)


@pytest.mark.parametrize("where", ["memory", "model", None])
def test_a_configuration_with_an_unknown_key_takes_no_more_than_itself(where: str | None) -> None:
    later = a_report()
    stated = later["generations"][0]["config"]
    (stated[where] if where else stated)["numa"] = True
    found = read(later)
    assert isinstance(found, Report)
    whole = read(a_report())
    assert isinstance(whole, Report)
    assert found.generations[0].config is None
    assert found.generations[0].fingerprint == whole.generations[0].fingerprint
    assert (found.leases, found.wanted, found.pid) == (whole.leases, whole.wanted, whole.pid)


def test_one_unknown_configuration_hides_no_other() -> None:
    later = a_report()
    second = {**later["generations"][0], "number": 2, "serving": False, "role": "held"}
    second["config"] = {**second["config"], "numa": True}
    later["generations"].append(second)
    found = read(later)
    assert isinstance(found, Report)
    assert [held.config for held in found.generations] == [config(), None]


def test_a_report_that_can_not_be_read_names_both_versions() -> None:
    with pytest.raises(ProtocolError) as caught:
        read(a_report() | {"state": "dreaming", "version": "9.1"})
    own = wcache.__version__
    assert caught.value.message == f"runs wcache 9.1, whose report wcache {own} can not read"


def test_no_version_is_blamed_for_a_report_of_the_same_one() -> None:
    with pytest.raises(ProtocolError, match="not a message: "):
        read(a_report() | {"state": "dreaming", "version": wcache.__version__})
    with pytest.raises(ProtocolError, match="not a message: "):
        read(a_report() | {"state": "dreaming", "version": ["9"] * 9})


def test_a_refusal_for_a_later_reason_keeps_its_words() -> None:
    later = {"type": "refused", "reason": "raining", "message": "it rains", "hint": "umbrella"}
    assert read(later) == Refused(reason="invalid", message="it rains", hint="umbrella")


@pytest.mark.parametrize(
    "message",
    [{"type": "sung"}, {"type": "refused", "reason": "raining"}, {"type": "attached"}, [], 3,
     {"type": "refused", "message": 7}, {"type": ["report"]}, {"type": "report"}],
)  # fmt: skip
def test_what_is_no_reply_is_refused(message: object) -> None:
    with pytest.raises(ProtocolError, match="not a message: "):
        read(message)


def test_what_is_no_json_is_refused() -> None:
    deep = b"[" * (MAX_FRAME_BYTES // 2)
    for body in (b"\xff", b"{", deep, b'{"type":"refused","message":' + deep):
        with pytest.raises(ProtocolError, match="not a message: "):
            decode_reply(body)


def test_fields_that_an_answer_needs_are_not_made_up() -> None:
    with pytest.raises(ProtocolError, match="manifest_digest"):
        read({"type": "attached", "generation": 1, "slabs": []})
    attached = Attached(generation=1, manifest_digest="sha256:00", slabs=())
    assert read(said(attached) | {"later": 1}) == attached


def test_a_message_that_a_daemon_does_not_know_is_told_from_a_bad_one() -> None:
    unknown = Refused(reason="bad_request", message="not a message: Invalid value 'stage'")
    assert is_unknown(unknown)
    assert not is_unknown(Refused(reason="bad_request", message="hello was said before"))
    assert not is_unknown(Refused(reason="invalid", message="not a message: x"))
