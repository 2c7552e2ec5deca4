"""Rests of expert hosts: longer with each failure, over with an answer, of one expert or of all."""

from __future__ import annotations

from peerd.core.ids import PeerId
from peerd.experts.rules.host_rests import FIRST_S, HostRests
from peerd.run.grid import Uid

H, OTHER = (PeerId.from_public_key(bytes([n]) * 32) for n in (1, 2))
E, F = Uid(0, (1, 2)), Uid(0, (1, 3))


def test_a_host_rests_with_all_its_experts_until_one_answers() -> None:
    rests = HostRests()
    assert [rests.failed(now, H) for now in (0.0, 0.1, FIRST_S)] == [1, 1, 2]
    assert (rests.rests(3 * FIRST_S - 0.1, H, E), rests.rests(3 * FIRST_S - 0.1, H, F)) == (True, True)
    assert not rests.rests(FIRST_S, OTHER, E)
    assert not rests.rests(3 * FIRST_S, H, E)
    rests.answered(H, E)
    assert rests.failed(3 * FIRST_S, H) == 1


def test_a_host_without_an_expert_rests_with_that_one_only() -> None:
    rests = HostRests()
    rests.failed(0.0, H, E)
    assert (rests.rests(1.0, H, E), rests.rests(1.0, H, F), rests.resting(1.0)) == (True, False, 1)
    assert (rests.hosts(1.0), rests.hosts(FIRST_S)) == (frozenset({H.raw}), frozenset[bytes]())
    rests.answered(H, F)
    assert rests.rests(1.0, H, E)
    rests.answered(H, E)
    assert not rests.rests(1.0, H, E)
