"""The end of a stream travels by itself: js-libp2p drops data that comes in one frame with it."""

from __future__ import annotations

from peerd.wire.yamux.session import FIN, HEADER, Changed, YamuxSession


def frames_of(data: bytes) -> list[tuple[int, int]]:
    """(flags, length) of each frame."""
    found, at = [], 0
    while at < len(data):
        _, kind, flags, _, length = HEADER.unpack_from(data, at)
        found.append((flags, length))
        at += HEADER.size + (length if kind == 0 else 0)
    return found


def test_the_end_of_a_stream_never_shares_a_frame_with_its_data() -> None:
    ours, theirs = YamuxSession(initiator=True, now=0.0), YamuxSession(initiator=False, now=0.0)
    stream = ours.open(0.0)
    ours.write(stream, b"the last words")
    ours.close_write(stream)
    out = memoryview(bytearray(1000))
    sent = b""
    while size := ours.fill(out):
        sent += bytes(out[:size])
    frames = frames_of(sent)
    assert [length for flags, length in frames if flags & FIN] == [0]
    assert sum(length for _, length in frames) == len(b"the last words")
    events = theirs.receive(sent, 0.0)
    received = next(event.stream for event in events if isinstance(event, Changed))
    assert received.take(100) == b"the last words"
    assert received.fin_received


def test_the_end_follows_when_the_data_just_filled_the_frame() -> None:
    ours = YamuxSession(initiator=True, now=0.0)
    stream = ours.open(0.0)
    ours.write(stream, bytes(1000))
    ours.close_write(stream)
    out = memoryview(bytearray(1000 + HEADER.size))
    assert ours.fill(out) == len(out)
    assert not stream.fin_sent
    while ours.fill(out):
        pass
    assert stream.fin_sent
