"""A stream that is alone sends long frames from where the writer has the bytes; a stream in company takes turns."""

from __future__ import annotations

import os

from peerd.wire.yamux.session import HEADER, Changed, YamuxSession

UNIT = 1000


def unpacked(data: bytes) -> tuple[int, int]:
    """(stream, length) of the frame that `data` begins with."""
    _, _, _, stream, length = HEADER.unpack_from(data)
    return stream, length


def test_a_lonely_stream_spills_whole_units_that_are_never_copied() -> None:
    ours, theirs = YamuxSession(initiator=True, now=0.0), YamuxSession(initiator=False, now=0.0)
    data = memoryview(os.urandom(10 * UNIT))
    stream = ours.open(0.0)
    ours.write(stream, data)
    into = memoryview(bytearray(UNIT))
    size = ours.fill(into, 4 * UNIT + 999)
    assert size == UNIT
    assert ours.spill is not None
    assert ours.spill.obj is data.obj
    assert len(ours.spill) == 4 * UNIT
    assert unpacked(bytes(into)) == (1, 5 * UNIT - HEADER.size)
    assert stream.out_bytes == sum(map(len, stream.out)) == 5 * UNIT + HEADER.size
    events = theirs.receive(bytes(into), 0.0) + theirs.receive(bytes(ours.spill), 0.0)
    received = next(event.stream for event in events if isinstance(event, Changed))
    assert received.take(5 * UNIT) == data[: 5 * UNIT - HEADER.size]


def test_a_spill_never_exceeds_the_window() -> None:
    ours = YamuxSession(initiator=True, now=0.0)
    stream = ours.open(0.0)
    ours.write(stream, bytes(300 * UNIT))
    into = memoryview(bytearray(UNIT))
    sent = 0
    while size := ours.fill(into, 50 * UNIT):
        sent += size - HEADER.size + len(ours.spill or b"")
    assert sent == 256 * 1024
    assert stream.send_credit == 0


def test_streams_in_company_take_turns_and_do_not_spill() -> None:
    ours = YamuxSession(initiator=True, now=0.0)
    for stream in (ours.open(0.0), ours.open(0.0)):
        ours.write(stream, bytes(10 * UNIT))
    into = memoryview(bytearray(UNIT))
    turns = []
    for _ in range(4):
        ours.fill(into, 9 * UNIT)
        assert ours.spill is None
        turns.append(unpacked(bytes(into))[0])
    assert turns == [1, 3, 1, 3]


def test_what_is_left_after_a_spill_is_still_reported_to_a_waiting_writer() -> None:
    ours = YamuxSession(initiator=True, now=0.0)
    stream = ours.open(0.0)
    stream.low_water = UNIT
    ours.write(stream, bytes(5 * UNIT))
    ours.fill(memoryview(bytearray(UNIT)), 9 * UNIT)
    assert ours.drained == [stream]
    assert stream.out_bytes == HEADER.size
