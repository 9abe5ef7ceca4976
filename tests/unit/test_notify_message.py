"""What a service says to its supervisor, as sd_notify(3) has it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wcache.errors import ProtocolError
from wcache.supervise.direct.notify_message import (
    DEFAULT_NAME,
    MAX_MESSAGE_BYTES,
    MAX_NAME,
    NotifyMessage,
    is_name,
    parse,
)

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (b"READY=1", NotifyMessage(ready=True)),
        (b"READY=1\n", NotifyMessage(ready=True)),
        (b"READY=1\0", NotifyMessage(ready=True)),
        (b"READY=0", NotifyMessage()),
        (b"READY=1\nSTATUS=2 slabs", NotifyMessage(ready=True, status="2 slabs")),
        (b"STATUS=a=b", NotifyMessage(status="a=b")),
        (b"STATUS=", NotifyMessage(status="")),
        (b"STATUS=\x1b[31mred\x07", NotifyMessage(status="[31mred")),
        (b"STATUS=\xff", NotifyMessage(status="�")),
        (b"STATUS=first\nSTATUS=second", NotifyMessage(status="first")),
        (b"STOPPING=1", NotifyMessage(stopping=True)),
        (b"WATCHDOG=1", NotifyMessage(watchdog="ping")),
        (b"WATCHDOG=trigger", NotifyMessage(watchdog="trigger")),
        (b"WATCHDOG=2", NotifyMessage()),
        (b"WATCHDOG_USEC=1500000", NotifyMessage(watchdog_s=1.5)),
        (b"WATCHDOG_USEC=0", NotifyMessage(watchdog_s=0.0)),
        (b"WATCHDOG_USEC=-1", NotifyMessage()),
        (b"WATCHDOG_USEC=1s", NotifyMessage()),
        (b"EXTEND_TIMEOUT_USEC=60000000", NotifyMessage(extend_s=60.0)),
        ("EXTEND_TIMEOUT_USEC=٣".encode(), NotifyMessage()),
        (b"FDSTORE=1\nFDPOLL=0\nFDNAME=g1.slab.0", NotifyMessage(store=True, name="g1.slab.0")),
        (b"FDSTOREREMOVE=1\nFDNAME=g1.slab.0", NotifyMessage(remove=True, name="g1.slab.0")),
        (b"FDSTORE=1\nFDNAME=a:b", NotifyMessage(store=True)),
        (b"BARRIER=1", NotifyMessage(barrier=True)),
        (b"MAINPID=1\nERRNO=5\nEXIT_STATUS=1\nX_OWN=1", NotifyMessage()),
        (b"", NotifyMessage()),
        (b"\n\n=\nREADY", NotifyMessage()),
    ],
)
def test_assignments_are_taken_as_systemd_takes_them(said: bytes, meant: NotifyMessage) -> None:
    assert parse(said) == meant


@pytest.mark.parametrize(
    "said",
    [b"x" * (MAX_MESSAGE_BYTES + 1), b"READY=1\0STATUS=x", b"BARRIER=1\nREADY=1"],
    ids=["too long", "zero byte", "barrier with more"],
)
def test_what_is_no_message_is_refused(said: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse(said)


def test_a_descriptor_without_a_name_is_stored_under_the_usual_one() -> None:
    assert parse(b"FDSTORE=1").store_name == DEFAULT_NAME
    assert parse(b"FDSTORE=1\nFDNAME=").store_name == DEFAULT_NAME
    assert parse(b"FDSTORE=1\nFDNAME=slab").store_name == "slab"


@pytest.mark.parametrize("name", ["a:b", "a\tb", "é", "\x7f", "n" * (MAX_NAME + 1)])
def test_a_name_that_the_environment_could_not_carry_is_none(name: str) -> None:
    assert not is_name(name)
    assert is_name("n" * MAX_NAME)


def test_an_endless_extension_is_bounded() -> None:
    extended = parse(b"EXTEND_TIMEOUT_USEC=" + b"9" * 4000).extend_s
    assert extended is not None
    assert extended < 1e8


@given(st.binary(max_size=MAX_MESSAGE_BYTES + 10))
def test_any_bytes_are_a_message_or_a_protocol_error(said: bytes) -> None:
    try:
        message = parse(said)
    except ProtocolError:
        return
    assert message.name is None or is_name(message.name)
    assert message.status is None or message.status.isprintable()
