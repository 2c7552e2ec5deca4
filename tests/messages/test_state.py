"""A state as a row of pieces: every byte of every tensor is in exactly one place, and the root stands for all."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.messages.state import DIGEST_BYTES, STATE_ALIGN_BYTES, StateLayout, TensorSpec, piece_digest, read_layout
from peerd.messages.swarm import Position

sizes = st.lists(st.integers(0, 300), max_size=8)


def layout_of(found: list[int], piece_bytes: int) -> StateLayout:
    return StateLayout([TensorSpec(f"t{i}", "uint8", (size,)) for i, size in enumerate(found)], piece_bytes)


@given(sizes, st.integers(1, 500))
def test_pieces_put_together_are_the_state(found: list[int], piece_bytes: int) -> None:
    layout = layout_of(found, piece_bytes)
    payloads = [memoryview(bytes((i + j) % 255 + 1 for j in range(size))) for i, size in enumerate(found)]
    row = memoryview(bytearray(layout.total_bytes))
    for number in range(layout.pieces):
        begin, end = layout.piece(number)
        assert 0 < end - begin <= piece_bytes
        row[begin:end] = layout.cut_out(number, payloads)
    assert [bytes(view) for view in layout.views(row)] == [bytes(payload) for payload in payloads]
    assert all(begin % STATE_ALIGN_BYTES == 0 for begin in layout.begins)


@given(sizes, st.integers(1, 500))
def test_each_byte_is_in_one_span(found: list[int], piece_bytes: int) -> None:
    layout = layout_of(found, piece_bytes)
    covered = [0] * len(found)
    for number in range(layout.pieces):
        for tensor, begin, end, _ in layout.spans(number):
            assert covered[tensor] == begin
            covered[tensor] = end
    assert covered == found


def test_a_piece_inside_one_tensor_is_not_copied() -> None:
    data = bytearray(1000)
    (piece, *_) = [layout_of([1000], 100).cut_out(3, [memoryview(data)])]
    data[300] = 9
    assert piece[0] == 9


def test_whatever_differs_gives_another_root() -> None:
    layout = layout_of([100, 100], 64)
    digests = piece_digest(b"x") * layout.pieces
    roots = {
        layout.root(Position(1, b"a"), digests),
        layout.root(Position(2, b"a"), digests),
        layout.root(Position(1, b"b"), digests),
        layout.root(Position(1, b"a"), bytes(DIGEST_BYTES) + digests[DIGEST_BYTES:]),
        layout_of([100, 101], 64).root(Position(1, b"a"), digests),
        StateLayout([TensorSpec("t0", "int8", (100,)), TensorSpec("t1", "uint8", (100,))], 64).root(
            Position(1, b"a"), digests
        ),
    }
    assert len(roots) == 6


def test_an_unknown_dtype_is_an_error() -> None:
    with pytest.raises(KeyError):
        StateLayout([TensorSpec("t", "float8", (3,))])


SPECS = [
    TensorSpec("opt/0.weight/exp_avg", "float32", (3, 4)),
    TensorSpec("param/0.weight", "float64", (3, 4)),
    TensorSpec("present", "uint8", (1,)),
    TensorSpec("step", "int64", ()),
]


def test_the_text_of_a_layout_is_read_back() -> None:
    layout = StateLayout(SPECS)
    assert read_layout(layout.text, layout.digest) == SPECS
    assert StateLayout(read_layout(layout.text, layout.digest)).digest == layout.digest
    with pytest.raises(ValueError, match="wrong digest"):
        read_layout(layout.text, bytes(32))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"a\0float32\0[3]",
        b"a\0float32\0[3]\0b\0",
        b"a\0float33\0[3]\0",
        b"a\0float32\0[3,4]\0",
        b"a\0float32\0[-3]\0",
        b"a\0float32\0[1, 1, 1, 1, 1, 1, 1, 1, 1]\0",
        b"a\0float32\0(3)\0",
        b"b\0float32\0[3]\0a\0float32\0[3]\0",
        b"a\0float32\0[3]\0a\0float32\0[3]\0",
        b"a\0float32\0[999999999999999]\0",
        b"a\xff\0float32\0[3]\0",
    ],
)
def test_a_text_that_is_no_layout_is_refused_though_its_digest_is_right(text: bytes) -> None:
    with pytest.raises(ValueError):
        read_layout(text, hashlib.sha256(text).digest())
