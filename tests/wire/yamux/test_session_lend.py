"""Received bytes may be looked at where they lie, until the next loan; their buffer goes back to the pool just once."""

from __future__ import annotations

import pytest

from peerd.wire.buffers import BufferPool
from peerd.wire.yamux.stream import YamuxStream

SIZE = 1 << 16


class CountingPool(BufferPool):
    """Remembers what came back."""

    def __init__(self) -> None:
        super().__init__(SIZE, keep=8)
        self.returned: list[object] = []

    def give(self, buffer: object) -> None:
        self.returned.append(buffer)
        super().give(buffer)


@pytest.fixture
def pool() -> CountingPool:
    return CountingPool()


@pytest.fixture
def stream(pool: CountingPool) -> YamuxStream:
    return YamuxStream(1, inbound=True, now=0.0, pool=pool)


def arrive(stream: YamuxStream, pool: BufferPool, byte: int) -> bytearray:
    """A whole buffer of one byte, as a bulk transfer brings it."""
    buffer = pool.take()
    buffer[:] = bytes([byte]) * SIZE
    assert stream.put(memoryview(buffer), SIZE)
    return buffer


def test_a_loan_is_not_copied_and_cannot_be_written_to(stream: YamuxStream, pool: CountingPool) -> None:
    buffer = arrive(stream, pool, 7)
    view = stream.lend(1 << 20)
    assert view.obj is buffer
    assert view.readonly
    assert bytes(view) == bytes(buffer)
    assert stream.inbox_bytes == 0
    assert pool.returned == []


def test_the_next_loan_ends_the_one_before(stream: YamuxStream, pool: CountingPool) -> None:
    first, _ = arrive(stream, pool, 1), arrive(stream, pool, 2)
    old = stream.lend(1 << 20)
    assert set(stream.lend(1 << 20)) == {2}
    assert pool.returned == [first]
    with pytest.raises(ValueError, match="released"):
        old[0]


def test_a_buffer_lent_in_parts_goes_back_after_the_last(stream: YamuxStream, pool: CountingPool) -> None:
    buffer = arrive(stream, pool, 3)
    total = 0
    while stream.inbox:
        assert pool.returned == []
        total += len(stream.lend(10_000))
    assert total == SIZE
    stream.end_loan()
    stream.end_loan()
    assert pool.returned == [buffer]


def test_taking_and_lending_may_alternate(stream: YamuxStream, pool: CountingPool) -> None:
    for byte in (1, 2, 3):
        arrive(stream, pool, byte)
    assert set(stream.lend(100)) == {1}
    assert stream.take(SIZE) == bytes([1]) * (SIZE - 100) + bytes([2]) * 100
    assert set(stream.lend(1 << 20)) == {2}
    into = bytearray(SIZE)
    assert stream.take_into(memoryview(into)) == SIZE
    assert set(into) == {3}
    assert stream.inbox_bytes == 0


def test_small_pieces_that_were_joined_can_be_lent_while_more_arrive(stream: YamuxStream, pool: CountingPool) -> None:
    assert not stream.put(memoryview(b"small"), 5)
    view = stream.lend(3)
    assert not stream.put(memoryview(b", more"), 6)
    assert view == b"sma"
    assert stream.take(100) == b"ll, more"
