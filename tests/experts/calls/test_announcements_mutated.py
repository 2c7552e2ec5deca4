"""Announcements of experts as mutated bytes: what is believed lies inside the grid, all else is a ProtocolViolation."""

from __future__ import annotations

from typing import Any, cast

import pytest

from peerd.core.errors import ProtocolViolation
from peerd.core.ids import PeerId
from peerd.experts.calls.expert_directory import ExpertDirectory
from peerd.messages.encoding import encode
from peerd.messages.experts import Announced, Name
from peerd.run.grid import Uid
from tests.kit.mutate import mutated
from tests.worlds.machines.fakehost import TrioClock
from tests.worlds.network.expertworld import experts_run

LIAR = PeerId.from_public_key(bytes(32))


class Nobody:
    """A host that learns addresses and has no gate."""

    id = LIAR
    gate = None

    def learn(self, peer: PeerId, addrs: list[Any], *, by: PeerId | None = None) -> None:
        assert peer == by == LIAR


@pytest.mark.parametrize("prefix", [Uid(0, (1,)), Uid(1, (3, 2))], ids=str)
async def test_whatever_a_record_holds_its_claims_are_inside_the_grid(prefix: Uid) -> None:
    nobody = cast(Any, Nobody())
    directory = ExpertDirectory(experts_run(4, 5, 11, layers=2), nobody, nobody, nobody, TrioClock())
    last = len(prefix.at) == 2
    bits = b"\x81\x04" if last else b"\x11"
    numbers = [5, 0, 1 << 40] if last else []
    good = encode(Announced(Name.of(prefix), bits, numbers, numbers, 0.5, ["/ip4/1.2.3.4/tcp/5"]))
    claims = dict(directory._told(LIAR, good, prefix))
    assert sorted(claims) == ([0, 7, 10] if last else [0, 4])
    believed = 0
    for index in range(1500):
        value = mutated([good], 7, index)
        try:
            told = list(directory._told(LIAR, value, prefix))
        except ProtocolViolation:
            continue
        believed += 1
        assert told, f"index {index}"
        for coordinate, claim in told:
            uid = prefix.below(coordinate)
            assert directory.grid.holds(uid), f"index {index}"
            assert claim.host == LIAR
            assert 0 <= claim.generation < 1 << 53
    assert believed > 10, "some mutations leave it valid, or nothing is tried here"
