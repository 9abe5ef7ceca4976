"""Frames: any cut of the stream gives the same messages, and no length is believed unseen."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wcache.errors import ProtocolError
from wcache.protocol.messages import (
    MAX_FRAME_BYTES,
    REPLIES,
    REQUESTS,
    FrameReader,
    Hello,
    Progress,
    Refused,
    Request,
    decode_body,
    encode_frame,
)

pytestmark = pytest.mark.unit


@given(bodies=st.lists(st.binary(min_size=1, max_size=50), max_size=8), data=st.data())
def test_frames_survive_any_cut(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    reader = FrameReader()
    seen: list[bytes] = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        seen += reader.feed(stream[:cut])
        stream = stream[cut:]
    assert seen == bodies
    assert reader.is_empty


def test_length_is_refused_before_its_bytes_come() -> None:
    for length in (0, MAX_FRAME_BYTES + 1, 0xFFFFFFFF):
        with pytest.raises(ProtocolError, match=f"frame of {length} bytes"):
            list(FrameReader().feed(length.to_bytes(4, "big")))


def test_longest_frame_is_taken() -> None:
    body = b"x" * MAX_FRAME_BYTES
    assert list(FrameReader().feed(MAX_FRAME_BYTES.to_bytes(4, "big") + body)) == [body]


def test_message_that_fits_no_frame_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="does not fit in a frame"):
        encode_frame(Refused(reason="gone", message="x" * MAX_FRAME_BYTES))


@pytest.mark.parametrize(
    "message",
    [Hello(role="client", command="x"), Progress(phase="read", done_bytes=1, total_bytes=2)],
)
def test_message_comes_out_as_it_went_in(message: Request) -> None:
    assert decode_body(encode_frame(message)[4:], REQUESTS) == message


def test_unknown_fields_are_passed_over_so_that_one_can_be_added() -> None:
    body = msgspec.json.encode({"type": "leased", "generation": 3, "colour": "red"})
    assert decode_body(body, REPLIES).generation == 3  # type: ignore[union-attr]  # it is Leased
