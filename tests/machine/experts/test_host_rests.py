"""Rests of expert hosts: longer with each failure, over with an answer, of one expert or of all."""

from __future__ import annotations

from peerd.core.experts.grid import Uid
from peerd.core.ids import PeerId
from peerd.machine.experts.host_rests import FIRST_S, LONGEST_S, HostRests

H, OTHER = (PeerId.from_public_key(bytes([n]) * 32) for n in (1, 2))
E, F = Uid(0, (1, 2)), Uid(0, (1, 3))


def test_a_host_rests_longer_with_each_failure_up_to_the_longest() -> None:
    rests, now = HostRests(), 0.0
    for failures in range(1, 12):
        assert rests.failed(now, H) == failures
        assert rests.failed(now, H) == failures  # calls that fail together are one failure
        rest_s = min(FIRST_S * 2 ** (failures - 1), LONGEST_S)
        assert rests.rests(now + rest_s - 0.01, H, E)
        assert rests.rests(now + rest_s - 0.01, H, F)
        assert not rests.rests(now, OTHER, E)
        now += rest_s
        assert not rests.rests(now, H, E)
    rests.answered(H, E)
    assert rests.failed(now, H) == 1


def test_a_host_without_an_expert_rests_with_that_one_only() -> None:
    rests = HostRests()
    rests.failed(0.0, H, E)
    assert (rests.rests(1.0, H, E), rests.rests(1.0, H, F), rests.resting(1.0)) == (True, False, 1)
    assert (rests.hosts(1.0), rests.hosts(FIRST_S)) == (frozenset({H.raw}), frozenset[bytes]())
    rests.answered(H, F)
    assert rests.rests(1.0, H, E)
    rests.answered(H, E)
    assert not rests.rests(1.0, H, E)


def test_no_more_is_remembered_than_allowed() -> None:
    rests = HostRests(remember=3)
    for number in range(10):
        rests.failed(0.0, H, Uid(0, (number,)))
    assert (len(rests), rests.rests(1.0, H, Uid(0, (9,))), rests.rests(1.0, H, Uid(0, (0,)))) == (3, True, False)
