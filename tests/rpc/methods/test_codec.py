"""The wire of calls: every message comes back as it was, however the bytes are cut; the rest is a violation."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import (
    Cause,
    LocalError,
    Overloaded,
    PeerdError,
    ProtocolViolation,
    Refused,
    TooSlow,
    Unreachable,
)
from peerd.core.ids import PeerId
from peerd.core.limits import RPC_BODY_BYTES, RPC_DEADLINE_S, RPC_FRAMES, RPC_ROUND_DEADLINE_S
from peerd.rpc.methods import message_codec
from peerd.rpc.methods.message_codec import (
    MessageParser,
    RpcMessage,
    decode_failure,
    encode_call,
    encode_failure,
    encode_frames,
)
from tests.kit.frames import raw_header

GOLDEN = Path(__file__).parents[2] / "golden" / "rpc_v2.bin"
PEER = PeerId.from_public_key(bytes(32))
FRAMES = (TensorFrame("float32", (2,), b"12345678"), TensorFrame("uint8", (0,), b""), TensorFrame("int8", (3,), b"abc"))

Seen = tuple[int, int, bytes, bytes, int, tuple[bytes, ...] | None]


def with_frames(kind: int, call_id: int, body: bytes, frames: tuple[TensorFrame, ...] = FRAMES) -> bytes:
    headers, payloads = encode_frames(frames)
    if kind in (message_codec.REQUEST, message_codec.OPEN):
        start = encode_call(kind, call_id, b"do", 1.5, body, headers, len(frames))
    else:
        start = message_codec.encode_message(kind, call_id, body, headers, len(frames))
    return start + b"".join(payloads)


def conversation() -> bytes:
    """One message of each kind, with and without frames."""
    return b"".join(
        [
            encode_call(message_codec.REQUEST, 1, b"find", 10.0, b"who?"),
            with_frames(message_codec.REQUEST, 2, b"take"),
            message_codec.encode_message(message_codec.CANCEL, 1),
            message_codec.encode_message(message_codec.REPLY, 1, b"me"),
            with_frames(message_codec.OPEN, 3, b""),
            with_frames(message_codec.PART, 3, b"more"),
            message_codec.encode_message(message_codec.PART, 3),
            message_codec.encode_message(message_codec.END, 3),
            with_frames(message_codec.REPLY, 2, b"done"),
            encode_failure(3, Overloaded("full", 0.25)),
        ]
    )


def drive(pieces: list[bytes], accept: bool = True) -> tuple[list[Seen], bool]:
    """The messages that a driver sees for these pieces, and True when the stream may end there."""
    parser, seen = MessageParser(), []
    data = b"".join(pieces)
    sizes, at = [len(piece) for piece in pieces], 0

    def receive(most: int) -> bytes:
        nonlocal at
        while sizes and not sizes[0]:
            del sizes[0]
        count = min(most, sizes[0]) if sizes else 0
        if sizes:
            sizes[0] -= count
        at += count
        return data[at - count : at]

    piece = receive(1 << 20)
    while piece:
        again = True
        while again:
            again = False
            for message in parser.feed(piece):
                piece = b""
                payloads = None
                if message.headers:
                    buffers = parser.accept() if accept else parser.skip()
                    while parser.wanted and (more := receive(parser.wanted)):
                        parser.fill(more)
                    payloads = tuple(bytes(buffer) for buffer in buffers) if buffers is not None else None
                    if parser.wanted:
                        return seen, False
                    again = True
                seen.append((message.kind, message.id, message.body, message.name, message.timeout_ms, payloads))
        piece = receive(1 << 20)
    return seen, parser.clean


WHOLE, CLEAN = drive([conversation()])


def test_one_message_of_each_kind_is_read() -> None:
    data = tuple(bytes(frame.payload) for frame in FRAMES)
    assert CLEAN
    assert WHOLE[:-1] == [
        (message_codec.REQUEST, 1, b"who?", b"find", 10_000, None),
        (message_codec.REQUEST, 2, b"take", b"do", 1500, data),
        (message_codec.CANCEL, 1, b"", b"", 0, None),
        (message_codec.REPLY, 1, b"me", b"", 0, None),
        (message_codec.OPEN, 3, b"", b"do", 1500, data),
        (message_codec.PART, 3, b"more", b"", 0, data),
        (message_codec.PART, 3, b"", b"", 0, None),
        (message_codec.END, 3, b"", b"", 0, None),
        (message_codec.REPLY, 2, b"done", b"", 0, data),
    ]
    assert WHOLE[-1][:2] == (message_codec.ERROR, 3)


def test_the_wire_has_the_bytes_that_were_agreed() -> None:
    assert conversation() == GOLDEN.read_bytes()


def test_messages_are_read_byte_by_byte() -> None:
    assert drive([bytes([byte]) for byte in conversation()]) == (WHOLE, True)


@given(st.lists(st.integers(1, 60), max_size=30))
def test_messages_are_read_however_they_are_cut(cuts: list[int]) -> None:
    data, pieces = conversation(), []
    for cut in cuts:
        pieces.append(data[:cut])
        data = data[cut:]
    assert drive([*pieces, data]) == (WHOLE, True)


def test_a_stream_cut_anywhere_inside_a_message_is_not_clean() -> None:
    data = conversation()
    clean = [end for end in range(1, len(data) + 1) if drive([data[:end]])[1]]
    assert len(clean) == len(WHOLE)


def test_skipped_payloads_do_not_disturb_what_follows() -> None:
    seen, clean = drive([conversation()], accept=False)
    assert clean
    assert [message[:5] for message in seen] == [message[:5] for message in WHOLE]


def test_the_rest_of_a_payload_can_be_skipped_half_way() -> None:
    parser, data = (
        MessageParser(),
        with_frames(message_codec.REPLY, 1, b"") + message_codec.encode_message(message_codec.END, 1),
    )
    wall = len(data) - 14 - 11 + 3  # three payload bytes in
    (message,) = parser.feed(data[:wall])
    parser.accept()
    assert (message.payload_bytes, parser.wanted) == (11, 8)
    parser.skip()
    parser.fill(data[wall : wall + 8])
    assert [m.kind for m in parser.feed(data[wall + 8 :])] == [message_codec.END]


def test_nothing_is_allocated_before_the_driver_accepts() -> None:
    parser = MessageParser()
    (message,) = parser.feed(with_frames(message_codec.REQUEST, 1, b"")[:-11])
    assert message.payload_bytes == 11
    assert not parser.clean
    with pytest.raises(LocalError):
        parser.feed(b"x")
    assert [len(buffer) for buffer in parser.accept()] == [8, 0, 3]
    with pytest.raises(LocalError):
        parser.fill(b"x" * 12)


def head(size: int, kind: int, frames: int = 0) -> bytes:
    return struct.pack(">IBBQ", size, kind, frames, 1)


@pytest.mark.parametrize(
    "data",
    [
        head(0, 0),
        head(0, 8),
        head(0, 255),
        head(1, message_codec.END),
        head(0, message_codec.END, 1),
        head(1, message_codec.CANCEL),
        head(0, message_codec.ERROR, 1),
        head(5000, message_codec.ERROR),
        head(RPC_BODY_BYTES + 1, message_codec.REPLY),
        head(RPC_BODY_BYTES + 1, message_codec.PART),
        head(0xFFFFFFFF, message_codec.REQUEST),
        head(0xFFFFFFFF, message_codec.REPLY, 1),
        head(100, message_codec.REPLY, RPC_FRAMES + 1),
        head(4, message_codec.REQUEST) + bytes(4),  # no room for a name
        head(5, message_codec.REQUEST) + bytes([0, 0, 0, 1, 9]),  # the name is longer than the block
        head(60, message_codec.REQUEST) + bytes([0, 0, 0, 1, 40]) + bytes(55),  # a name above the limit
        head(3, message_codec.REPLY, 1) + bytes(3),  # a frame header that does not fit
        head(12, message_codec.REPLY, 1) + bytes(12),  # no magic
    ],
)
def test_malformed_messages_are_violations(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        MessageParser().feed(data)


def test_frames_that_are_too_much_together_are_a_violation() -> None:
    plain = raw_header(9, 0, (200 << 20,), 200 << 20)
    packed = raw_header(9, 0, (200 << 20,), 5 * 200, flags=1)  # little to send, much to unpack
    for frame in (plain, packed):
        with pytest.raises(ProtocolViolation, match="in one message"):
            MessageParser().feed(head(2 * len(frame), message_codec.REPLY, 2) + frame + frame)
    with pytest.raises(LocalError, match="allowed"):
        encode_frames([TensorFrame("uint8", (0,), b"")] * (RPC_FRAMES + 1))
    with pytest.raises(LocalError, match="allowed"):
        encode_frames([TensorFrame("uint8", (200 << 20,), bytes(1000), lossless=True)] * 2)


def test_a_packed_frame_counts_as_what_it_unpacks_to() -> None:
    frame = TensorFrame("uint8", (3 << 20,), bytes(100), lossless=True)
    (message,) = MessageParser().feed(with_frames(message_codec.REPLY, 1, b"", (frame, *FRAMES)))
    assert (message.payload_bytes, message.frame_bytes) == (111, (3 << 20) + 11)


def failure_of(error: PeerdError) -> PeerdError:
    (message,) = MessageParser().feed(encode_failure(1, error))
    return decode_failure(message.body, PEER)


@pytest.mark.parametrize("cause", Cause)
def test_the_cause_of_a_refusal_travels_unless_only_this_peer_can_see_it(cause: Cause) -> None:
    found = failure_of(Refused("in words", cause=cause))
    local = cause in (Cause.NO_SUCH_PROTOCOL, Cause.OURSELVES)
    assert isinstance(found, Refused)
    assert (found.cause, found.args[0]) == (Cause.OTHER if local else cause, "in words")


def test_failures_travel_by_type() -> None:
    busy = failure_of(Overloaded("full", 1.5))
    assert isinstance(busy, Overloaded)
    assert (busy.retry_after_s, busy.peer) == (1.5, PEER)
    assert isinstance(failure_of(TooSlow("late")), TooSlow)
    for error in (Refused("no"), Unreachable("no"), LocalError("no")):
        refusal = failure_of(error)
        assert isinstance(refusal, Refused)
        assert str(refusal) == f"no (peer {PEER.short})"


def test_a_reason_is_cut_cleaned_and_bounded() -> None:
    text = str(failure_of(Refused("\x1b[31m" + "é" * 5000)))
    assert text.startswith("?[31mé")
    assert len(text) < 600
    assert "?" in str(failure_of(Refused("\udcff")))
    late = failure_of(Overloaded("", float("inf")))
    assert isinstance(late, Overloaded)
    assert late.retry_after_s == RPC_DEADLINE_S
    with pytest.raises(ProtocolViolation):
        decode_failure(b"\x93\xa5tired\xa0\x00", PEER)


def test_an_endless_time_out_travels_as_the_longest() -> None:
    (message,) = MessageParser().feed(encode_call(message_codec.REQUEST, 1, b"x", float("inf"), b""))
    assert isinstance(message, RpcMessage)
    assert message.timeout_ms == RPC_ROUND_DEADLINE_S * 1000
