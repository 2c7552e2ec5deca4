"""Hosts share experts by speed: a host that has more than its part hands some to one that has less, and no further."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from peerd.core.limits import EXPERT_TAKING
from peerd.experts.rules.host_share import HostShare, best_taker, experts_to_give, given_first, parts_of_all
from peerd.run.grid import Uid
from tests.worlds.network.hosts import keypair

shares = st.builds(HostShare, st.integers(0, 200), st.integers(0, 200), st.one_of(st.just(0.0), st.floats(1e-6, 10.0)))


@pytest.mark.parametrize(
    ("own", "other", "count"),
    [
        (HostShare(32, 0, 0.01), HostShare(0, 32, 0.01), 16),
        (HostShare(32, 0, 0.01), HostShare(0, 5, 0.01), 5),
        (HostShare(30, 0, 0.03), HostShare(0, 99, 0.01), 22),  # three times as fast: three quarters
        (HostShare(32, 0, 0.01), HostShare(0, 32, 1.0), 0),  # so slow that it has no part
        (HostShare(32, 0, 0.01), HostShare(0, 32), 4),  # nobody knows how fast it is
        (HostShare(32, 0, 0.01), HostShare(4, 28), 0),  # it has some to show it
        (HostShare(32, 0), HostShare(0, 32), 4),
        (HostShare(19, 0, 0.01), HostShare(12, 9, 0.01), 0),  # the difference is small
        (HostShare(20, 0, 0.01), HostShare(10, 9, 0.01), 5),
        (HostShare(3, 0, 0.01), HostShare(1, 9, 0.01), 1),
        (HostShare(2, 0, 0.01), HostShare(0, 9, 0.0001), 1),  # it keeps one
        (HostShare(1, 0, 0.01), HostShare(0, 9, 0.01), 0),
        (HostShare(400, 0, 0.01), HostShare(0, 999, 0.01), EXPERT_TAKING),
    ],
)
def test_a_host_gives_what_the_other_should_have_by_its_speed(own: HostShare, other: HostShare, count: int) -> None:
    assert experts_to_give(own, other) == count


@given(shares, shares)
def test_no_expert_is_given_back_for_what_was_just_given(own: HostShare, other: HostShare) -> None:
    count = experts_to_give(own, other)
    assert 0 <= count <= min(max(0, own.hosted - 1), other.places, EXPERT_TAKING)
    after = HostShare(own.hosted - count, own.places + count, own.sample_s)
    given_to = HostShare(other.hosted + count, other.places - count, other.sample_s)
    if count:
        assert experts_to_give(given_to, after) == 0


@given(st.lists(shares, min_size=2, max_size=8))
@example([HostShare(0, 24, 0.125), HostShare(3, 0), HostShare(24, 0, 3.0)])
def test_hosts_that_share_come_to_rest(all_hosts: list[HostShare]) -> None:
    hosts = dict(enumerate(all_hosts))
    total = sum(host.hosted for host in hosts.values())
    for _ in range(40):
        moved = 0
        for i, own in hosts.items():
            others = {keypair(str(j)).peer_id: host for j, host in hosts.items() if j != i}
            names = {keypair(str(j)).peer_id: j for j in hosts}
            found = best_taker(hosts[i], others)
            if found is not None:
                j, count = names[found[0]], found[1]
                own, other = hosts[i], hosts[j]
                hosts[i] = HostShare(own.hosted - count, own.places + count, own.sample_s)
                hosts[j] = HostShare(other.hosted + count, other.places - count, other.sample_s)
                moved += count
        if not moved:
            break
    assert moved == 0
    assert sum(host.hosted for host in hosts.values()) == total


def test_what_a_host_leaves_goes_to_all_that_have_places_by_their_speed() -> None:
    fast, slow, full = (keypair(name).peer_id for name in ("fast", "slow", "full"))
    uids = [Uid(0, (i, j)) for i in range(4) for j in range(3)]
    others = {fast: HostShare(4, 20, 0.01), slow: HostShare(4, 20, 0.03), full: HostShare(4, 0, 0.001)}
    parts = parts_of_all(uids, others)
    assert {peer: len(part) for peer, part in parts.items()} == {fast: 11, slow: 1}
    assert sorted(parts[fast] + parts[slow]) == uids
    few = parts_of_all(uids, {fast: HostShare(0, 3, 0.01), slow: HostShare(0, 2)})
    assert {peer: len(part) for peer, part in few.items()} == {fast: 3, slow: 2}
    assert parts_of_all(uids, {}) == {}


def test_the_host_that_lacks_most_is_chosen_and_the_experts_by_lot() -> None:
    one, two = keypair("one").peer_id, keypair("two").peer_id
    own = HostShare(30, 0, 0.01)
    assert best_taker(own, {one: HostShare(10, 40, 0.01), two: HostShare(2, 40, 0.01)}) == (two, 14)
    assert best_taker(own, {one: HostShare(29, 40, 0.01)}) is None
    assert best_taker(own, {}) is None
    uids = [Uid(layer, (row, column)) for layer in range(2) for row in range(2) for column in range(2)]
    order = given_first(uids, one)
    assert sorted(order) == uids
    assert order == given_first(reversed(uids), one)
    assert order != given_first(uids, two)
