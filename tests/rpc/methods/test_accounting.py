"""The books of calls: limits hold, late calls are found, bytes are counted."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.errors import LocalError, ProtocolViolation
from peerd.rpc.methods.method_load import Crowd, MethodLoad, PendingCalls, method_name
from peerd.wire.budget.book import EVERYBODY, ShareAccount, User
from tests.kit.declared import declared


def test_a_method_name_is_taken_apart() -> None:
    method = method_name("dht/4/find")
    assert (method.service, method.protocol, method.name) == ("dht/4", "/peerd/dht/4", b"find")


@pytest.mark.parametrize(
    "full", ["dht", "dht/find", "dht/0/find", "dht/1/", "Dht/1/x", "dht/4/x/y", "dht/1/" + "x" * 33]
)
def test_other_names_are_our_own_mistake(full: str) -> None:
    with pytest.raises(LocalError):
        method_name(full)


def test_limits_say_what_they_object_to() -> None:
    limits = declared(body_bytes=10, frames=2, frame_bytes=100)
    assert limits.objection(10, 2, 100) is None
    assert limits.objection(11, 0, 0) == "a body of 11 bytes; allowed: 10"
    assert limits.objection(0, 3, 0) == "a message of 3 frames; allowed: 2"
    assert limits.objection(0, 1, 101) == "frames of 101 bytes; allowed: 100"
    limits = declared(frames=2, frame_bytes=100, rows=4)
    assert limits.objection(0, 2, 100, 4) is None
    assert limits.objection(0, 2, 100, 5) == "a frame of 5 samples; allowed: 4 samples"
    assert declared().objection(0, 1, 0) is not None  # frames must be asked for


def nobody(peer: str) -> bool:
    return False


def member(peer: str) -> bool:
    return peer.startswith("member")


def user(number: int, place: str = "", region: str = "") -> User:
    return User(f"peer {number}", place or f"place {number}", region or f"region {number}")


def test_a_load_has_a_bound_for_each_peer_and_for_all() -> None:
    load = MethodLoad(declared(calls_per_peer=2, calls=3))
    a, b = User("a", "a", "a"), User("member b", "b", "b")
    assert load.enter(a, nobody) is None
    assert load.enter(a, nobody) == Crowd(1, "a has 1")
    assert load.enter(a, lambda peer: peer == "a") == Crowd(1, "a has 1")  # a third of three is all there is of half
    assert load.enter(b, member) is None
    assert load.enter(user(3), nobody) is None
    assert load.enter(user(4), nobody) == Crowd(EVERYBODY, "all together have 3")
    for each in (a, b, user(3)):
        load.leave(each, 1.0)
    assert (load.running, load.by_user, load.counters.calls) == (0, {}, 3)
    assert load.retry_after_s() == 1.0


def test_a_place_has_a_quarter_a_network_half_and_members_a_quarter_for_themselves() -> None:
    load = MethodLoad(declared(calls=64, calls_per_peer=8))

    def entered(count: int, place: str, region: str, peer: str) -> int:
        users = [User(f"{peer} {place} {n // 8}", place, region) for n in range(count)]
        return sum(load.enter(one, member) is None for one in users)

    assert entered(64, "place 1", "region 1", "stranger") == 16
    assert entered(64, "place 2", "region 1", "stranger") == 16
    assert entered(64, "place 3", "region 1", "stranger") == 0
    assert entered(64, "place 4", "region 2", "stranger") == 16
    assert entered(64, "place 5", "region 3", "stranger") == 0
    assert entered(64, "place 1", "region 1", "member") == 16  # of one place together: half
    assert load.running == 64
    load.check()


def test_where_few_calls_run_at_once_each_share_is_at_least_one() -> None:
    for calls in (1, 2, 3):
        load = MethodLoad(declared(calls=calls))
        assert [load.enter(user(n), nobody) is None for n in range(4)] == [n < calls for n in range(4)]


@given(st.lists(st.tuples(st.integers(0, 11), st.booleans()), max_size=200), st.integers(1, 24), st.integers(1, 6))
def test_shares_hold_whatever_comes_and_goes(moves: list[tuple[int, bool]], calls: int, per_peer: int) -> None:
    load = MethodLoad(declared(calls=calls, calls_per_peer=per_peer))
    users = [
        User(f"{'member' if n % 3 == 0 else 'peer'} {n}", f"place {n // 2}", f"region {n // 6}") for n in range(12)
    ]
    running: list[User] = []
    for number, comes in moves:
        one = users[number]
        if comes:
            whole = ShareAccount(load.declared.share)
            for other in running:
                whole.add(other, 1)
            full = whole.objection(one, 1, member(one.peer))
            assert load.enter(one, member) == (None if full is None else Crowd(*full))
            running += [one] if full is None else []
        elif one in running:
            running.remove(one)
            load.leave(one, 0.0)
        load.check()
    assert load.running == len(running)


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
