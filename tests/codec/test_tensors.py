"""Tensors as frames and back: bit for bit, without copies where possible, and never more than was asked for."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerd.codec.format.frame import DTYPES, TensorFrame
from peerd.codec.frames import from_frame, to_frame
from peerd.codec.tensors import all_finite, all_finite_in, largest_in, state_digest
from peerd.core.errors import LocalError, ProtocolViolation

SHAPES = [(), (0,), (1,), (5,), (3, 4), (2, 0, 3)]


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_a_tensor_of_every_dtype_and_shape_comes_back_bit_for_bit(name: str) -> None:
    dtype = getattr(torch, name)
    for shape in SHAPES:
        tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 50).abs().to(dtype)
        frame = to_frame(tensor)
        assert (frame.dtype, frame.shape, frame.coding) == (name, shape, "none")
        for payload in (bytes(frame.payload), bytearray(frame.payload), memoryview(bytearray(frame.payload))):
            back = from_frame(TensorFrame(name, shape, payload), shape, dtype)
            assert (back.dtype, back.shape) == (dtype, shape)
            assert torch.equal(back, tensor)


def test_an_uncoded_tensor_and_its_frame_share_memory_both_ways() -> None:
    tensor = torch.zeros(8)
    frame = to_frame(tensor)
    tensor[3] = 1.0
    assert from_frame(frame)[3] == 1.0
    buffer = bytearray(32)
    from_frame(TensorFrame("float32", (8,), buffer))[0] = 1.0
    assert buffer[:4] == torch.ones(1).numpy().tobytes()


def test_a_payload_that_starts_at_an_odd_byte_is_read_all_the_same() -> None:
    buffer = bytearray(1) + torch.arange(4.0).numpy().tobytes()
    assert from_frame(TensorFrame("float32", (4,), memoryview(buffer)[1:])).tolist() == [0, 1, 2, 3]


def test_a_tensor_that_is_not_contiguous_travels_in_c_order() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(from_frame(to_frame(tensor)), tensor)


@pytest.mark.parametrize(("coding", "relative"), [("bf16", 2**-8), ("fp16", 2**-11)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_coded_tensor_comes_back_in_its_own_dtype_within_half_a_unit(
    coding: str, relative: float, dtype: torch.dtype
) -> None:
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    frame = to_frame(tensor, coding)
    assert memoryview(frame.payload).nbytes == 128
    back = from_frame(frame, (64,), dtype)
    assert ((back - tensor).abs() <= tensor.abs() * relative).all()


def test_a_value_beyond_fp16_becomes_its_largest_and_nan_stays() -> None:
    back = from_frame(to_frame(torch.tensor([1e6, -1e6, float("nan")]), "fp16"))
    assert back[:2].tolist() == [65504.0, -65504.0]
    assert back[2].isnan()


def test_whole_numbers_travel_uncoded_whatever_the_coding() -> None:
    frame = to_frame(torch.tensor([1 << 40]), "bf16")
    assert frame.coding == "none"
    assert from_frame(frame).tolist() == [1 << 40]


def test_what_frames_cannot_carry_is_our_own_error() -> None:
    with pytest.raises(LocalError, match="complex64"):
        to_frame(torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(LocalError, match="int3"):
        to_frame(torch.zeros(1), "int3")


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (TensorFrame("float32", (3,), bytes(12)), r"activations has shape \[3\]; expected \[any, 4\]"),
        (TensorFrame("float32", (2, 3), bytes(24)), r"activations has shape \[2, 3\]; expected \[any, 4\]"),
        (TensorFrame("float64", (1, 4), bytes(32)), "activations is of float64; expected float32"),
        (TensorFrame("float31", (1, 4), bytes(16)), "activations is of float31"),
        (TensorFrame("float32", (1, 4), bytes(15)), "activations has 15 payload bytes; expected 16"),
        (TensorFrame("float32", (1 << 40, 4), b""), "activations: a tensor of shape"),
        (TensorFrame("float32", (1, 4), bytes(16), "zip"), "activations: unknown coding"),
        (to_frame(torch.tensor([[1.0, float("inf"), 0.0, 0.0]])), "activations has values that are not finite"),
        (to_frame(torch.tensor([[1.0, float("nan"), 0.0, 0.0]]), "bf16"), "activations has values that are not finite"),
    ],
)
def test_a_frame_that_is_not_what_was_asked_for_is_refused_by_name(frame: TensorFrame, words: str) -> None:
    with pytest.raises(ProtocolViolation, match=words):
        from_frame(frame, (None, 4), torch.float32, name="activations", finite=True)


def test_a_bool_that_is_neither_zero_nor_one_is_true() -> None:
    assert from_frame(TensorFrame("bool", (3,), b"\x00\x01\x07")).tolist() == [False, True, True]


@given(
    dtype=st.sampled_from([*sorted(DTYPES), "nothing"]),
    shape=st.lists(st.integers(-2, 1 << 33), max_size=10).map(tuple),
    payload=st.binary(max_size=64),
    coding=st.sampled_from(["none", "bf16", "fp16", "else"]),
)
def test_no_frame_at_all_raises_anything_but_a_protocol_violation(
    dtype: str, shape: tuple[int, ...], payload: bytes, coding: str
) -> None:
    with contextlib.suppress(ProtocolViolation):
        from_frame(TensorFrame(dtype, shape, payload, coding), finite=True)


def test_finite_values_whose_sum_is_not_are_finite() -> None:
    assert all_finite(torch.full((4,), 3e38))
    assert all_finite(torch.tensor([1, 2]))
    assert not all_finite(torch.tensor([1.0, float("-inf"), float("inf")]))


def test_digests_tell_names_dtypes_shapes_and_values_apart_but_not_order() -> None:
    base = {"a": torch.zeros(4), "b": torch.ones(2)}
    others = [
        {"a": torch.zeros(4), "c": torch.ones(2)},
        {"a": torch.zeros(2, 2), "b": torch.ones(2)},
        {"a": torch.zeros(4, dtype=torch.int32), "b": torch.ones(2)},
        {"a": torch.zeros(4), "b": torch.tensor([1.0, 1.0000001])},
        {"a": torch.zeros(4)},
    ]
    assert len({state_digest(state) for state in [base, *others]}) == 6
    assert state_digest(dict(reversed(base.items()))) == state_digest(base)
    assert len(state_digest(base)) == 32


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_one_bad_value_among_many_tensors_is_found(device: str) -> None:
    good = [torch.ones(3), torch.full((4,), 3e38), torch.tensor([1, 2]), torch.ones(2, dtype=torch.bfloat16)]
    assert all_finite_in([tensor.to(device) for tensor in good])
    assert all_finite_in([])
    for bad in (torch.nan, torch.inf):
        assert not all_finite_in([tensor.to(device) for tensor in (*good, torch.tensor([1.0, bad]))])


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_the_largest_of_many_tensors_has_either_sign_and_what_is_no_number_counts(device: str) -> None:
    some = [torch.ones(3, 2), torch.tensor([0.5, -4.0]), torch.empty(0), torch.full((2,), 3.0, dtype=torch.bfloat16)]
    assert largest_in([]) == 0.0
    assert largest_in(tensor.to(device) for tensor in some) == 4.0
    assert largest_in(tensor.to(device) for tensor in (*some, torch.tensor([9.0]))) == 9.0
    assert largest_in(tensor.to(device) for tensor in (*some, torch.tensor([-torch.inf]))) == torch.inf
    assert math.isnan(largest_in(tensor.to(device) for tensor in (torch.tensor([1.0, torch.nan]), *some)))
