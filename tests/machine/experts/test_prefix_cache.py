"""The prefix cache: entries of bounded age and number, and the highest claim first."""

from __future__ import annotations

import random

import pytest

from peerd.core.experts.grid import Uid
from peerd.core.ids import PeerId
from peerd.core.limits import EXPERT_CLAIMS
from peerd.machine.experts.prefix_cache import CachedClaim, PrefixCache, ranked

P, Q = Uid(0, (1,)), Uid(0, (2,))


def host(number: int) -> PeerId:
    return PeerId.from_public_key(bytes([number]) * 32)


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
