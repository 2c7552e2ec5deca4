"""Numbers of microbatches on the wire: short where they follow each other, and never more than a batch has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.errors import ProtocolViolation
from peerd.messages.encoding import Message, decode, encode
from peerd.messages.swarm import MAX_MICROBATCHES, Seqs


class Sample(Message, frozen=True):
    seqs: Seqs


@given(st.lists(st.integers(0, 40) | st.integers(0, (1 << 62) - 1), max_size=100))
def test_any_numbers_come_back_in_their_order(numbers: list[int]) -> None:
    assert list(decode(Sample, encode(Sample(Seqs.of(numbers)))).seqs) == numbers


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(-1, 42))
def test_numbers_are_found_where_they_are(numbers: list[int], number: int) -> None:
    assert (number in Seqs.of(numbers)) == (number in numbers)


def test_a_whole_batch_of_one_session_takes_a_few_bytes() -> None:
    first = (7 << 31) + 5
    assert len(encode(Sample(Seqs.of(range(first, first + MAX_MICROBATCHES))))) < 32


@pytest.mark.parametrize(
    "spans",
    [
        [(0, MAX_MICROBATCHES), (0, 1)],
        [(0, MAX_MICROBATCHES + 1)],
        [(3, 0)],
        [(-1, 1)],
        [(1 << 62, 1)],
        [(0, 1)] * (MAX_MICROBATCHES + 1),
    ],
)
def test_too_many_numbers_and_impossible_ones_are_refused(spans: list[tuple[int, int]]) -> None:
    class Raw(Message, frozen=True):
        seqs: tuple[list[tuple[int, int]]]

    with pytest.raises(ProtocolViolation):
        decode(Sample, encode(Raw((spans,))))


def test_more_than_a_batch_cannot_be_said() -> None:
    with pytest.raises(ValueError, match="more than 16384"):
        Seqs.of(range(MAX_MICROBATCHES + 1))
