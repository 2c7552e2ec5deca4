"""The books of calls: limits hold, late calls are found, bytes are counted."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.errors import LocalError, ProtocolViolation
from peerd.core.ids import PeerId
from peerd.machine.rpc.accounting import MethodLimits, MethodLoad, PendingCalls, method_name

A, B = (PeerId.from_public_key(bytes([n]) * 32) for n in (1, 2))


def test_a_method_name_is_taken_apart() -> None:
    method = method_name("dht/3/find")
    assert (method.service, method.protocol, method.name) == ("dht/3", "/peerd/dht/3", b"find")


@pytest.mark.parametrize(
    "full", ["dht", "dht/find", "dht/0/find", "dht/1/", "Dht/1/x", "dht/3/x/y", "dht/1/" + "x" * 33]
)
def test_other_names_are_our_own_mistake(full: str) -> None:
    with pytest.raises(LocalError):
        method_name(full)


def test_limits_say_what_they_object_to() -> None:
    limits = MethodLimits(body_bytes=10, frames=2, frame_bytes=100)
    assert limits.objection(10, 2, 100) is None
    assert limits.objection(11, 0, 0) == "a body of 11 bytes; allowed: 10"
    assert limits.objection(0, 3, 0) == "a message of 3 frames; allowed: 2"
    assert limits.objection(0, 1, 101) == "frames of 101 bytes; allowed: 100"
    assert MethodLimits().objection(0, 1, 0) is not None  # frames must be asked for
    limits = MethodLimits(frames=2, frame_bytes=100, rows=4)
    assert limits.objection(0, 2, 100, 4) is None
    assert limits.objection(0, 2, 1000, 5) == "a frame of 5 samples; allowed: 4 samples"


def test_a_load_has_a_bound_for_each_peer_and_for_all() -> None:
    load = MethodLoad(MethodLimits(calls_per_peer=2, calls=3))
    assert [load.enter(A) for _ in range(2)] == [None, None]
    assert load.enter(A) == "2 calls of yours are running"
    assert load.enter(B) is None
    assert load.enter(B) == "3 calls are running"
    load.leave(A, 1.0)
    assert load.enter(B) is None
    for peer in (A, B, B):
        load.leave(peer, 1.0)
    assert (load.running, load.by_peer, load.counters.calls) == (0, {}, 4)
    assert load.retry_after_s() == 1.0


def test_calls_are_answered_once_and_ids_rise() -> None:
    calls: PendingCalls[str] = PendingCalls(most=2)
    assert [calls.add(1.0, "a"), calls.add(2.0, "b"), calls.add(3.0, "c")] == [1, 2, None]
    assert calls.pop(2) == "b"
    assert calls.pop(2) is None  # a late second answer is nobody's business
    assert calls.add(4.0, "d") == 3
    assert calls.drain() == ["a", "d"]
    assert calls.due == math.inf


@pytest.mark.parametrize("call_id", [0, 2, 1 << 63])
def test_an_answer_to_a_call_never_made_is_a_violation(call_id: int) -> None:
    calls: PendingCalls[str] = PendingCalls()
    calls.add(1.0, "a")
    with pytest.raises(ProtocolViolation):
        calls.pop(call_id)


@given(st.lists(st.one_of(st.floats(0, 10), st.just("answer"), st.just("wake")), max_size=40))
def test_no_call_outlives_its_deadline_when_woken_at_due(steps: list[float | str]) -> None:
    calls: PendingCalls[float] = PendingCalls()
    now = 0.0
    waiting: dict[int, float] = {}
    for step in steps:
        if isinstance(step, float):
            call_id = calls.add(now + step, now + step)
            assert call_id is not None
            waiting[call_id] = now + step
        elif step == "answer" and waiting:
            call_id = next(iter(waiting))
            assert calls.pop(call_id) == waiting.pop(call_id)
        elif step == "wake" and calls.due < math.inf:
            now = max(now, calls.due)
            for call_id, deadline in calls.overdue(now):
                assert waiting.pop(call_id) == deadline <= now
        assert calls.due <= min(waiting.values(), default=math.inf)
        assert len(calls) == len(waiting)
