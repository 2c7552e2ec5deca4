"""The prefix cache: entries of bounded age and number, and the highest claim first.
Bitmaps of experts that may be asked: as the claims say, without hosts that rest or cannot be reached.
"""

from __future__ import annotations

import random

import pytest

from peerd.core.ids import PeerId
from peerd.core.limits import EXPERT_CLAIMS
from peerd.experts.rules.host_rests import HostRests
from peerd.experts.rules.prefix_cache import CachedClaim, LiveBits, PrefixCache, ranked
from peerd.run.grid import Grid, Uid, coordinates_in

GRID, P, Q = Grid(1, (4, 9)), Uid(0, (1,)), Uid(0, (2,))


def host(number: int) -> PeerId:
    return PeerId.from_public_key(bytes([number]) * 32)


HOSTS = [host(n) for n in range(4)]
ONE = ranked([(3, CachedClaim(host(1)))])


def test_what_lives_and_what_does_not_are_remembered_each_for_its_time() -> None:
    cache = PrefixCache(10.0, 4.0)
    assert cache.get(0.0, P) is None
    cache.put(0.0, P, ONE)
    cache.put(0.0, Q, {})
    assert (cache.get(3.9, P), cache.get(3.9, Q)) == (ONE, {})
    assert (cache.get(9.9, P), cache.get(4.0, Q)) == (ONE, None)
    assert cache.get(10.0, P) is None
    cache.put(10.0, Q, ONE)
    assert cache.get(15.0, Q) == ONE
    cache.forget(Q)
    cache.forget(Q)
    assert cache.get(15.0, Q) is None


def test_of_hosts_that_claim_one_expert_the_highest_generation_and_then_peer_id_comes_first() -> None:
    told = [CachedClaim(host(n), generation) for n, generation in ((1, 7), (9, 3), (2, 7), (3, 0), (4, 1), (5, 0))]
    claims = ranked([(0, claim) for claim in told] + [(5, told[0])])
    assert [claim.host for claim in claims[0]] == [host(n) for n in (2, 1, 9, 4)][:EXPERT_CLAIMS]
    assert claims[5] == (told[0],)


def test_hosts_that_rest_take_no_place_from_others() -> None:
    told = [(0, CachedClaim(host(n), 100 if n else 0)) for n in range(EXPERT_CLAIMS + 2)]
    liars = {host(n).raw for n in range(1, EXPERT_CLAIMS + 2)}
    assert host(0) not in [claim.host for claim in ranked(told)[0]]
    assert ranked(told, liars)[0][-1].host == host(0)
    assert ranked(told, liars)[0][0].host == host(EXPERT_CLAIMS + 1), "the order is that of ranks all the same"


def test_only_entries_that_are_used_are_read_ahead_of_their_end() -> None:
    cache = PrefixCache(10.0, 4.0)
    for prefix, claims in ((P, ONE), (Q, ONE), (Uid(0, (3,)), {})):
        cache.put(0.0, prefix, claims)
    cache.get(1.0, P)
    cache.get(1.0, Uid(0, (3,)))
    assert [cache.due(now) for now in (4.9, 5.0, 9.9, 10.0)] == [[], [P], [P], []]
    cache.put(6.0, P, ONE)
    assert cache.due(12.0) == []


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_put_the_bounds_hold_and_the_latest_stays(seed: int) -> None:
    rng, cache = random.Random(seed), PrefixCache(10.0, 4.0, prefixes=5, claims=12)
    for _ in range(300):
        prefix = Uid(0, (rng.randrange(9),))
        claims = ranked([(rng.randrange(8), CachedClaim(host(rng.randrange(9)))) for _ in range(rng.randrange(7))])
        cache.put(0.0, prefix, claims)
        cache.check()
        assert cache.get(0.0, prefix) == claims
    assert 0 < len(cache) <= 5
    cache.put(0.0, P, ranked([(c, CachedClaim(host(1))) for c in range(13)]))
    assert cache.get(0.0, P) is None
    cache.check()


def test_the_next_claim_counts_while_the_highest_host_rests() -> None:
    rests = HostRests()
    bits = LiveBits(GRID, rests, lambda peer: True)
    claims = ranked([(8, CachedClaim(HOSTS[1], 2)), (8, CachedClaim(HOSTS[2], 1)), (3, CachedClaim(HOSTS[1]))])
    assert bits.of(0.0, {Q: claims}) == {Q: b"\x08\x01"}
    rests.failed(0.0, HOSTS[1])
    assert bits.of(1.0, {Q: claims}) == {Q: b"\x00\x01"}
    owner = bits.owner(1.0, Q.below(8), claims[8])
    assert owner is not None
    assert owner.host == HOSTS[2]
    assert bits.owner(1.0, Q.below(3), claims[3]) is None
    rests.failed(1.0, HOSTS[2], Q.below(8))
    assert bits.of(1.5, {Q: claims, Uid(0, (3,)): {}}) == {Q: b"", Uid(0, (3,)): b""}
    assert bits.of(3.1, {Q: claims}) == {Q: b"\x08\x01"}


def test_a_host_that_can_only_dial_counts_while_it_is_connected() -> None:
    linked = set[PeerId]()
    bits = LiveBits(GRID, HostRests(), lambda peer: peer in linked)
    claims = ranked([(0, CachedClaim(HOSTS[0], only_dials=True))])
    assert bits.of(0.0, {Q: claims}) == {Q: b""}
    linked.add(HOSTS[0])
    assert bits.of(0.0, {Q: claims}) == {Q: b"\x01\x00"}


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
