"""The message codec: strict whatever the bytes, and bounded before it works."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest

from peerd.core.errors import LocalError, ProtocolViolation
from peerd.messages.encoding import Empty, Message, decode, encode


class Inner(Message, frozen=True):
    name: str
    at: float


class Sample(Message, frozen=True):
    count: int
    data: bytes
    items: tuple[Inner, ...] = ()
    table: dict[str, int] = msgspec.field(default_factory=dict)


class Tree(Message, frozen=True):
    below: list[Tree]


SAMPLE = Sample(7, b"\x00\xff", (Inner("a", 0.5), Inner("é", -1.0)), {"k": 2**40})


def test_a_message_comes_back_as_it_was() -> None:
    assert decode(Sample, encode(SAMPLE)) == SAMPLE
    assert decode(Empty, encode(Empty())) == Empty()


def test_fields_travel_by_position_without_names() -> None:
    assert encode(Inner("ab", 0.5)) == b"\x92\xa2ab\xcb\x3f\xe0" + bytes(6)


def test_a_message_cut_anywhere_is_a_violation() -> None:
    data = encode(SAMPLE)
    for end in range(len(data)):
        with pytest.raises(ProtocolViolation):
            decode(Sample, data[:end])


def test_trailing_bytes_are_a_violation() -> None:
    with pytest.raises(ProtocolViolation):
        decode(Sample, encode(SAMPLE) + b"\xc0")


@pytest.mark.parametrize(
    "data",
    [
        b"\x95\x07\xc4\x00\x90\x80\x01",  # a surplus field
        b"\x91\x07",  # a field is missing
        b"\x92\xa17\xc4\x00",  # text for a number
        b"\x92\xcb\x40\x1c" + bytes(6) + b"\xc4\x00",  # 7.0 for 7
        b"\x93\x07\xc4\x00\x91\x92\xa1\xff\x00",  # broken UTF-8
        b"\x92\x07\xc6\xff\xff\xff\xff",  # bytes without end
        b"\x93\x07\xc4\x00\xdd\xff\xff\xff\xff",  # a list without end
        b"\x94\x07\xc4\x00\x90\xdf\xff\xff\xff\xff",  # a map without end
        b"\x92\x07\xc7\xff\x01",  # an extension type
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\x82\xa5count\x07\xa4data\xc4\x00",  # fields by name
        b"",
    ],
)
def test_malformed_messages_are_violations(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode(Sample, data)


def test_deep_nesting_is_a_violation_and_not_a_crash() -> None:
    with pytest.raises(ProtocolViolation):
        decode(Tree, b"\x91\x91" * 100_000)


def test_a_claimed_length_allocates_nothing() -> None:
    tracemalloc.start()
    for claim in (b"\xdd\x7f\xff\xff\xff", b"\xdc\xff\xff"):
        with pytest.raises(ProtocolViolation):
            decode(Sample, b"\x93\x07\xc4\x00" + claim + b"\x90" * 10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_message_above_the_limit_is_not_even_looked_at() -> None:
    with pytest.raises(ProtocolViolation, match="above the limit of 8"):
        decode(Sample, encode(SAMPLE), 8)
    with pytest.raises(LocalError, match="above the limit of 8"):
        encode(SAMPLE, 8)
