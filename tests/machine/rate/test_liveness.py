"""Suspicion doubles with each silence and ends with an answer."""

from __future__ import annotations

from peerd.core.ids import PeerId
from peerd.machine.rate.liveness import LONGEST_S, Liveness

PEER = PeerId.from_public_key(b"p" * 32)


def test_each_silence_doubles_the_time_a_peer_is_left_alone() -> None:
    liveness, now, waits = Liveness(), 0.0, []
    for _ in range(10):
        liveness.silent(now, PEER)
        before = now
        while liveness.shunned(now, PEER):
            now += 5.0
        waits.append(now - before)
    assert waits[:4] == [5.0, 10.0, 20.0, 40.0]
    assert waits[-1] == LONGEST_S


def test_many_failures_at_once_are_one_silence() -> None:
    liveness = Liveness()
    assert [liveness.silent(0.0, PEER) for _ in range(5)] == [1] * 5
    assert liveness.silent(5.0, PEER) == 2


def test_an_answer_ends_suspicion() -> None:
    liveness = Liveness()
    liveness.silent(0.0, PEER)
    assert liveness.suspected(PEER)
    liveness.answered(PEER)
    assert not liveness.suspected(PEER)
    assert not liveness.shunned(0.1, PEER)
    assert liveness.silent(0.2, PEER) == 1


def test_a_liar_is_shunned_as_long_as_its_judge_says() -> None:
    liveness = Liveness()
    liveness.lied(0.0, PEER, 300.0)
    assert liveness.shunned(299.0, PEER)
    assert liveness.cooled(299.0) == []
    assert liveness.cooled(300.0) == [PEER]


def test_what_it_remembers_is_bounded() -> None:
    liveness = Liveness(remember=3)
    peers = [PeerId.from_public_key(bytes([n]) * 32) for n in range(5)]
    for peer in peers:
        liveness.silent(0.0, peer)
    assert len(liveness) == 3
    assert not liveness.suspected(peers[0])
    assert liveness.suspected(peers[4])
