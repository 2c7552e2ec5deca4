"""Received bytes go straight to who waits for them, in order, and no further than wanted."""

from __future__ import annotations

import pytest

from peerd.core.errors import ProtocolViolation
from peerd.wire.buffers import BufferPool
from peerd.wire.noise.noise import PLAIN_BYTES, SEALED_BYTES, Opener, Sealer
from peerd.wire.yamux.stream import YamuxStream


def stream(landing_bytes: int) -> tuple[YamuxStream, bytearray]:
    found = YamuxStream(1, inbound=True, now=0.0, pool=BufferPool(100, keep=1))
    into = bytearray(landing_bytes)
    found.landing = memoryview(into)
    return found, into


def test_pieces_land_one_behind_the_other_and_the_rest_waits_in_the_inbox() -> None:
    found, into = stream(10)
    assert not found.put(memoryview(b"abcdef"), 100)
    assert not found.put(memoryview(b"ghijKLM"), 100)
    assert into == b"abcdefghij"
    assert found.landing is None
    assert found.landed_bytes == 10
    assert found.inbox_bytes == 3
    assert found.take(10) == b"KLM"


def test_a_place_is_given_only_for_what_fits_where_somebody_waits() -> None:
    found, into = stream(10)
    assert found.place(11) is None
    place = found.place(4)
    assert place is not None
    place[:] = b"wxyz"
    assert found.put(place, 4), "nobody else may use this memory again"
    assert into == b"wxyz" + bytes(6)
    assert found.landed_bytes == 4
    found.was_reset = True
    assert found.place(4) is None
    found.was_reset, found.landing = False, None
    assert found.place(4) is None


def sealed(sealer: Sealer, plain: bytes) -> bytes:
    frame = memoryview(bytearray(SEALED_BYTES))
    return bytes(frame[: sealer.seal(plain, frame)])


@pytest.mark.parametrize("piece_bytes", [1000, 65536, 1 << 20])
def test_large_frames_are_opened_where_they_belong_and_small_ones_are_not(piece_bytes: int) -> None:
    sealer, opener = Sealer(b"k" * 32), Opener(b"k" * 32, BufferPool(SEALED_BYTES, keep=1))
    plains = [b"small", b"x" * PLAIN_BYTES, b"y" * PLAIN_BYTES, b"end"]
    wire = b"".join(sealed(sealer, plain) for plain in plains)
    home = memoryview(bytearray(PLAIN_BYTES))
    asked: list[int] = []

    def place(size: int) -> memoryview | None:
        asked.append(size)
        return home if len(asked) == 1 else None

    got = [
        (bytes(plain), isinstance(plain, memoryview) and plain.obj is home.obj)
        for at in range(0, len(wire), piece_bytes)
        for plain in opener.each(wire[at : at + piece_bytes], place)
    ]
    assert asked == [PLAIN_BYTES, PLAIN_BYTES]
    assert got == list(zip(plains, [False, True, False, False], strict=True))


def test_an_opener_says_how_much_is_missing_of_the_frame_that_has_begun() -> None:
    wire = sealed(Sealer(b"k" * 32), b"x" * 1000)
    for at, missing in ((0, 1), (1, 1), (2, len(wire) - 2), (len(wire) - 1, 1)):
        opener = Opener(b"k" * 32)
        assert not opener.feed(wire[:at])
        assert opener.missing_bytes == missing
    assert opener.feed(wire[-1:]) == [b"x" * 1000]
    assert opener.missing_bytes == 1


def test_a_frame_that_was_changed_is_a_violation_wherever_it_was_opened() -> None:
    wire = bytearray(sealed(Sealer(b"k" * 32), b"x" * PLAIN_BYTES))
    wire[-1] ^= 1
    opener = Opener(b"k" * 32, BufferPool(SEALED_BYTES, keep=1))
    with pytest.raises(ProtocolViolation):
        list(opener.each(wire, lambda size: memoryview(bytearray(size))))


@pytest.mark.parametrize("piece_bytes", [70_000, 200_000, 1 << 20])
@pytest.mark.parametrize("room_bytes", [0, PLAIN_BYTES + 5, 3 * PLAIN_BYTES])
def test_full_frames_that_belong_in_a_row_come_as_one_and_the_rest_as_before(piece_bytes: int, room_bytes: int) -> None:
    sealer, opener = Sealer(b"k" * 32), Opener(b"k" * 32, BufferPool(SEALED_BYTES, keep=1))
    plains = [*(bytes([i]) * PLAIN_BYTES for i in range(4)), b"shorter" * 1000, b"end"]
    wire = b"".join(sealed(sealer, plain) for plain in plains)
    home = memoryview(bytearray(room_bytes))
    taken = 0

    def place(size: int) -> memoryview | None:
        return home[taken : taken + size] if size <= row() else None

    def row() -> int:
        return len(home) - taken

    got = []
    for at in range(0, len(wire), piece_bytes):
        for plain in opener.each(wire[at : at + piece_bytes], place, row):
            if isinstance(plain, memoryview) and plain.obj is home.obj:
                taken += len(plain)
            got.append(bytes(plain))
    assert b"".join(got) == b"".join(plains)
    assert taken == room_bytes // PLAIN_BYTES * PLAIN_BYTES
    in_rows = room_bytes >= 2 * PLAIN_BYTES and piece_bytes > 2 * SEALED_BYTES
    assert (max(map(len, got)) > PLAIN_BYTES) == in_rows


def test_what_comes_before_a_forged_frame_in_a_row_still_counts_and_it_is_refused() -> None:
    sealer, opener = Sealer(b"k" * 32), Opener(b"k" * 32, BufferPool(SEALED_BYTES, keep=1))
    wire = bytearray(b"".join(sealed(sealer, bytes([i]) * PLAIN_BYTES) for i in range(4)))
    wire[2 * SEALED_BYTES + 100] ^= 1
    home = memoryview(bytearray(4 * PLAIN_BYTES))
    got = opener.each(wire, lambda size: home[:size], lambda: len(home))
    assert bytes(next(got)) == bytes(PLAIN_BYTES) + b"\x01" * PLAIN_BYTES
    with pytest.raises(ProtocolViolation):
        next(got)
