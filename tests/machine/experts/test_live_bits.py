"""Bitmaps of experts that may be asked: as the claims say, without hosts that rest or cannot be reached."""

from __future__ import annotations

import random

import pytest

from peerd.core.experts.grid import Grid, Uid, coordinates_in
from peerd.core.ids import PeerId
from peerd.machine.experts.host_rests import HostRests
from peerd.machine.experts.prefix_cache import CachedClaim, LiveBits, ranked

GRID, P = Grid(1, (4, 9)), Uid(0, (2,))
HOSTS = [PeerId.from_public_key(bytes([n]) * 32) for n in range(4)]


def test_the_next_claim_counts_while_the_highest_host_rests() -> None:
    rests = HostRests()
    bits = LiveBits(GRID, rests, lambda peer: True)
    claims = ranked([(8, CachedClaim(HOSTS[1], 2)), (8, CachedClaim(HOSTS[2], 1)), (3, CachedClaim(HOSTS[1]))])
    assert bits.of(0.0, {P: claims}) == {P: b"\x08\x01"}
    rests.failed(0.0, HOSTS[1])
    assert bits.of(1.0, {P: claims}) == {P: b"\x00\x01"}
    owner = bits.owner(1.0, P.below(8), claims[8])
    assert owner is not None
    assert owner.host == HOSTS[2]
    assert bits.owner(1.0, P.below(3), claims[3]) is None
    rests.failed(1.0, HOSTS[2], P.below(8))
    assert bits.of(1.5, {P: claims, Uid(0, (3,)): {}}) == {P: b"", Uid(0, (3,)): b""}
    assert bits.of(3.1, {P: claims}) == {P: b"\x08\x01"}


def test_a_host_that_can_only_dial_counts_while_it_is_connected() -> None:
    linked = set[PeerId]()
    bits = LiveBits(GRID, HostRests(), lambda peer: peer in linked)
    claims = ranked([(0, CachedClaim(HOSTS[0], only_dials=True))])
    assert bits.of(0.0, {P: claims}) == {P: b""}
    linked.add(HOSTS[0])
    assert bits.of(0.0, {P: claims}) == {P: b"\x01\x00"}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_rests_a_bit_is_set_where_an_owner_is_found(seed: int) -> None:
    rng, rests, now = random.Random(seed), HostRests(), 0.0
    linked = {host for host in HOSTS if rng.random() < 0.5}
    bits = LiveBits(GRID, rests, linked.__contains__)
    prefixes = [Uid(0, (n,)) for n in range(4)]
    dialing = {host for host in HOSTS if rng.random() < 0.2}
    claims = {
        p: ranked(
            (rng.randrange(9), CachedClaim(host := rng.choice(HOSTS), rng.randrange(3), only_dials=host in dialing))
            for _ in range(rng.randrange(12))
        )
        for p in prefixes
    }
    for _ in range(60):
        now += rng.random() * 3
        uid = rng.choice(prefixes).below(rng.randrange(9))
        rests.failed(now, rng.choice(HOSTS), rng.choice([None, uid]))
        for prefix, found in bits.of(now, claims).items():
            owners = {c for c in range(9) if bits.owner(now, prefix.below(c), claims[prefix].get(c, ()))}
            assert set(coordinates_in(found)) == owners, f"seed {seed}"
