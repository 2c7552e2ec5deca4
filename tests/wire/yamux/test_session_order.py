"""Which stream sends first: small ones before large ones, and neither can starve the other."""

from __future__ import annotations

import random

import pytest

from peerd.wire.noise.noise import PLAIN_BYTES
from peerd.wire.yamux.frames import DATA, FIN, HEADER
from peerd.wire.yamux.session import YamuxSession, YamuxStream
from tests.worlds.machines.muxpair import MuxPair

LARGE = 4 << 20


def ready(pair: MuxPair, count: int) -> list[YamuxStream]:
    """Streams of `a` that are open, acknowledged, and may send as much as they want."""
    streams = [pair.a.mux.open(0.0) for _ in range(count)]
    for stream in streams:
        pair.a.mux.write(stream, b"hello")
        stream.send_credit = 1 << 30
    pair.carry()
    return streams


def sent(mux: YamuxSession, frames: int = 1) -> list[tuple[int, int]]:
    """(stream, bytes) of the data frames in the next so many full Noise frames."""
    into, found = memoryview(bytearray(PLAIN_BYTES)), []
    for _ in range(frames):
        size, at = mux.fill(into), 0
        while at < size:
            _, kind, _, stream, length = HEADER.unpack_from(into, at)
            at += HEADER.size + (length if kind == DATA else 0)
            if kind == DATA:
                found.append((stream, length))
    return found


def test_a_small_message_passes_all_bulk_that_waits() -> None:
    pair = MuxPair()
    *bulk, small = ready(pair, 30)
    for stream in bulk:
        pair.a.mux.write(stream, bytes(LARGE))
    sent(pair.a.mux, 3)
    pair.a.mux.write(small, b"quick")
    assert sent(pair.a.mux)[0] == (small.id, 5)


def test_a_flood_of_small_messages_leaves_bulk_more_than_a_third_of_the_line() -> None:
    pair = MuxPair()
    bulk, *small = ready(pair, 40)
    pair.a.mux.write(bulk, bytes(LARGE))
    counts = {True: 0, False: 0}
    for _ in range(40):
        for stream in small:
            if stream.out_bytes < 8000:
                pair.a.mux.write(stream, bytes(8000))
        for number, size in sent(pair.a.mux):
            counts[number == bulk.id] += size
    assert counts[True] > 0.34 * sum(counts.values())


def test_bulk_streams_share_what_small_ones_leave() -> None:
    pair = MuxPair()
    *bulk, small = ready(pair, 5)
    for stream in bulk:
        pair.a.mux.write(stream, bytes(LARGE))
    for _ in range(40):
        pair.a.mux.write(small, bytes(1000))
        sent(pair.a.mux)
    left = [stream.out_bytes for stream in bulk]
    assert max(left) - min(left) <= 2 * PLAIN_BYTES
    assert small.out_bytes == 0


def test_what_becomes_large_while_it_waits_no_longer_passes_others() -> None:
    pair = MuxPair()
    first, second, small = ready(pair, 3)
    pair.a.mux.write(first, bytes(100))
    pair.a.mux.write(first, bytes(LARGE))
    pair.a.mux.write(second, bytes(100))
    pair.a.mux.write(small, b"quick")
    assert [stream for stream, _ in sent(pair.a.mux)][:2] == [second.id, small.id]


def test_the_end_of_a_stream_does_not_wait_behind_bulk() -> None:
    pair = MuxPair()
    bulk, done = ready(pair, 2)
    pair.a.mux.write(bulk, bytes(LARGE))
    pair.a.mux.close_write(done)
    into = memoryview(bytearray(PLAIN_BYTES))
    pair.a.mux.fill(into)
    assert HEADER.unpack_from(into)[1:4] == (DATA, FIN, done.id)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_written_everything_leaves_and_nobody_waits_for_ever(seed: int) -> None:
    rng = random.Random(seed)
    pair = MuxPair()
    streams = ready(pair, 8)
    turns = dict.fromkeys((stream.id for stream in streams), 0)
    for _ in range(200):
        stream = rng.choice(streams)
        pair.a.mux.write(stream, bytes(rng.choice((1, 500, 20_000, 100_000))))
        for number, _ in sent(pair.a.mux, rng.randrange(2)):
            turns[number] = 0
        for stream in streams:
            turns[stream.id] = turns[stream.id] + 1 if stream.out_bytes else 0
            assert turns[stream.id] < 60
    while pair.a.mux.has_output:
        sent(pair.a.mux)
    assert not any(stream.out_bytes for stream in streams)


def test_a_message_passes_large_ones_that_open_their_streams() -> None:
    pair = MuxPair()
    (small,) = ready(pair, 1)
    for _ in range(100):
        pair.a.mux.write(pair.a.mux.open(0.0), bytes(32 << 10))
    pair.a.mux.write(small, b"quick")
    frames = sent(pair.a.mux)
    assert sum(size for _, size in frames[: frames.index((small.id, 5))]) == 0


def test_large_streams_name_their_protocols_before_any_goes_on() -> None:
    pair = MuxPair()
    for _ in range(100):
        pair.a.mux.write(pair.a.mux.open(0.0), bytes(32 << 10))
    opened = set(pair.a.mux.streams)
    frames = sent(pair.a.mux, 2)
    named = [stream for stream, _ in frames[:100]]
    assert set(named) == opened
    assert sum(size for _, size in frames[:100]) <= 100 * 512
