"""Sums of parts: in the senders' order, refused with a name, in memory that is used again only when nobody looks."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from peerd.averaging.reduce import PlainParts, SumFault, Vector, VectorMemory, sum_up, take_sum
from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import ProtocolViolation, Refused

CODER = PlainParts()


def frame(values: Vector) -> TensorFrame:
    return CODER.encode(0, values)


def test_a_sum_has_the_same_bits_however_its_versions_came() -> None:
    rng = np.random.default_rng(1)
    versions = [(rng.standard_normal(1000) * 10.0**i).astype("float32") for i in range(4)]
    expected = ((versions[0] + versions[1]) + versions[2]) + versions[3]
    for coded in range(16):
        given = [frame(v) if coded >> i & 1 else v for i, v in enumerate(versions)]
        target = np.full(1000, np.nan, dtype="float32")
        answer = sum_up(CODER, 0, given, target)
        assert isinstance(answer, TensorFrame)
        assert target.tobytes() == bytes(answer.payload) == expected.tobytes()


def test_a_version_that_does_not_decode_is_named() -> None:
    good, short = np.ones(8, dtype="float32"), np.ones(7, dtype="float32")
    found = sum_up(CODER, 0, [good, frame(good), frame(short)], np.empty(8, dtype="float32"))
    assert isinstance(found, SumFault)
    assert found.versions == [2]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_versions_that_are_not_finite_are_named(value: float) -> None:
    versions = [np.ones(8, dtype="float32") for _ in range(3)]
    versions[0][3] = versions[2][5] = value
    found = sum_up(CODER, 0, [versions[0], versions[1], frame(versions[2])], np.empty(8, dtype="float32"))
    assert isinstance(found, SumFault)
    assert found.versions == [0, 2]


def test_a_sum_may_lie_where_it_belongs_and_is_looked_at_all_the_same() -> None:
    target = np.arange(8, dtype="float32")
    take_sum(CODER, frame(target), target)
    assert (target == np.arange(8)).all()
    target[2] = np.inf
    with pytest.raises(ProtocolViolation, match="finite"):
        take_sum(CODER, frame(target), target)
    with pytest.raises(ProtocolViolation):
        take_sum(CODER, frame(target[:4]), target)


def test_a_coded_part_is_refused_where_parts_travel_plain() -> None:
    coded = TensorFrame("float32", (8,), bytes(16), "bf16")
    with pytest.raises(Refused):
        CODER.decode(coded, np.empty(8, dtype="float32"))


@pytest.mark.slow  # megabytes: small vectors are not kept
def test_memory_is_used_again_once_nobody_looks_at_any_part_of_it() -> None:
    memory, dtype = VectorMemory(), np.dtype("float32")
    first = memory.vector(1 << 20, dtype)
    place, view = first.ctypes.data, first[10:20]
    del first
    gc.collect()
    second = memory.vector(1 << 20, dtype)
    assert second.ctypes.data != place, "somebody still looks at it"
    view[:] = 7
    del view
    gc.collect()
    third = memory.vector(1 << 20, dtype)
    assert third.ctypes.data == place
    assert (third[10:20] == 7).all()
    assert memory.vector(1 << 19, dtype).shape == (1 << 19,)


@pytest.mark.slow
def test_memory_of_several_sizes_waits_for_its_like() -> None:
    memory, dtype = VectorMemory(keep=2), np.dtype("float32")
    large, small = memory.vector(1 << 20, dtype), memory.vector(1 << 19, dtype)
    places = large.ctypes.data, small.ctypes.data
    del large, small
    gc.collect()
    small, large = memory.vector(1 << 19, dtype), memory.vector(1 << 20, dtype)
    assert (large.ctypes.data, small.ctypes.data) == places
