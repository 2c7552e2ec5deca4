"""Hole punching's decisions: nobody is dialed at a stranger's wish, and pairs that fail rest longer and longer."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from peerd.core.addr import ip_of, parse_addr, reach, tcp_addr, tcp_place
from peerd.core.ids import PeerId
from peerd.core.limits import (
    PUNCH_ADDRS,
    PUNCH_PAIRS,
    PUNCH_PER_MINUTE,
    PUNCH_PER_PEER_MINUTE,
    PUNCH_TARGET_PER_MINUTE,
)
from peerd.reach import hole_punch
from peerd.reach.hole_punch import (
    LONGEST_PAUSE_S,
    PunchMemory,
    refused_pause_s,
    silence_s,
    speaks_first,
    to_dial,
    to_offer,
)

HOME = [parse_addr("/ip4/192.168.7.2/tcp/4001"), parse_addr("/ip4/127.0.0.1/tcp/4001")]
PUBLIC = parse_addr("/ip4/45.3.1.1/tcp/20643")
addrs = st.builds(tcp_addr, st.ip_addresses().map(str), st.integers(0, 65535))


def peer(number: int) -> PeerId:
    return PeerId.from_public_key(number.to_bytes(32, "big"))


def memory() -> PunchMemory:
    return PunchMemory(random.Random(1))


@given(st.lists(addrs | st.binary(max_size=30), max_size=40))
def test_only_public_hosts_and_our_own_network_are_ever_dialed(claimed: list[Multiaddr | bytes]) -> None:
    chosen = to_dial(claimed, HOME)
    assert len(chosen) <= PUNCH_ADDRS
    for addr in chosen:
        ip, place = ip_of(addr), tcp_place(addr)
        assert ip is not None
        assert place is not None
        assert place.port
        unfit = (ip.is_loopback, ip.is_multicast, ip.is_unspecified, ip.is_reserved, ip.is_link_local)
        assert not any(unfit)
        assert reach(addr) == 2 or str(ip).startswith("192.168.7.")


@pytest.mark.parametrize(
    ("claim", "dialed"),
    [
        ("/ip4/45.3.1.1/tcp/20643", True),
        ("/ip6/2a00:1450::7/tcp/4001", True),
        ("/ip4/192.168.7.9/tcp/4001", True),
        ("/ip4/192.168.8.9/tcp/4001", False),
        ("/ip4/192.168.7.2/tcp/4001", False),  # that is ourselves
        ("/ip4/10.0.0.1/tcp/22", False),
        ("/ip4/127.0.0.1/tcp/22", False),
        ("/ip4/224.0.0.1/tcp/22", False),
        ("/ip4/255.255.255.255/tcp/22", False),
        ("/ip4/169.254.169.254/tcp/80", False),
        ("/ip6/fe80::1/tcp/22", False),
        ("/ip6/::1/tcp/22", False),
        ("/ip4/45.3.1.1/tcp/0", False),
        ("/ip4/45.3.1.1/udp/4001/quic-v1", False),
        ("/dns4/internal.example.org/tcp/80", False),
        (f"/ip4/45.3.1.1/tcp/1/p2p/{peer(1)}/p2p-circuit", False),
    ],
)
def test_what_a_peer_claims_is_dialed_or_not(claim: str, dialed: bool) -> None:
    for form in (parse_addr(claim), parse_addr(claim).to_bytes()):
        assert bool(to_dial([form], HOME)) is dialed


def test_one_host_is_dialed_at_few_ports_and_not_often() -> None:
    ports = [tcp_addr("45.3.1.1", port) for port in range(1, 100)]
    assert len(to_dial(ports, HOME)) == PUNCH_ADDRS // 2
    held = memory()
    dialed = sum(len(held.admit(peer(now), to_dial(ports, HOME), now)) for now in range(60))
    assert dialed == PUNCH_TARGET_PER_MINUTE
    assert held.admit(peer(1), [PUBLIC], 200.0) == [PUBLIC]


def test_nobody_scans_networks_through_us() -> None:
    """Each proposal names other hosts; one peer, and all together, get so many a minute and no more."""
    held = memory()
    hosts = [tcp_addr(f"45.{number >> 8}.{number & 255}.1", 22) for number in range(2000)]
    assert sum(len(held.admit(peer(1), [host], 1.0)) for host in hosts) == PUNCH_PER_PEER_MINUTE
    others = sum(len(held.admit(peer(number), [host], 2.0)) for number, host in enumerate(hosts, start=2))
    assert others == PUNCH_PER_MINUTE - PUNCH_PER_PEER_MINUTE
    assert held.admit(peer(1), [PUBLIC], 61.5) == [PUBLIC]


def test_who_is_refused_pushes_nobody_out_of_the_tables() -> None:
    """Naming thousands of hosts does not make us forget how often the one before them was dialed."""
    held = memory()
    for number in range(PUNCH_TARGET_PER_MINUTE):
        assert held.admit(peer(number), [PUBLIC], 1.0) == [PUBLIC]
    for number in range(3000):
        held.admit(peer(number), [tcp_addr(f"45.{number >> 8}.{number & 255}.1", 1)], 2.0)
    assert held.admit(peer(4000), [PUBLIC], 3.0) == []


def test_all_addresses_of_an_ipv6_network_are_one_target() -> None:
    held = memory()
    hosts = [tcp_addr(f"2a00:1:2:3::{number:x}", 22) for number in range(1, 200)]
    admitted = [host for number, host in enumerate(hosts) if held.admit(peer(number), [host], 1.0)]
    assert len(admitted) == PUNCH_TARGET_PER_MINUTE


def test_pairs_are_remembered_up_to_a_bound() -> None:
    held = memory()
    for number in range(PUNCH_PAIRS + 50):
        held.failed(peer(number), [], "nothing came through", 0.0)
    assert len(held.pairs) == PUNCH_PAIRS
    assert peer(0) not in held.pairs


def test_a_pair_that_fails_rests_longer_each_time_and_says_why() -> None:
    held, now, rests = memory(), 100.0, []
    assert held.look([PUBLIC], peer(1), [], now)[0]
    for _ in range(8):
        held.failed(peer(1), [], "nothing came through", now)
        go, why = held.look([PUBLIC], peer(1), [], now + 1)
        assert not go
        assert "nothing came through" in why
        rests.append(held.due_s(peer(1)) - now)
        now = held.due_s(peer(1))
        assert held.look([PUBLIC], peer(1), [], now)[0]
    assert rests[0] < rests[1] < rests[2]
    assert all(rest <= 1.25 * LONGEST_PAUSE_S for rest in rests)


def test_a_meeting_that_nobody_answered_is_repeated_soon_and_then_ever_less_often() -> None:
    held, rests = memory(), []
    for _ in range(12):
        held.failed(peer(1), [], "no answer within 10 s", 0.0, answered=False)
        rests.append(held.due_s(peer(1)))
    assert rests[0] < 12  # a relayed link that died is replaced by then
    assert rests[0] < rests[1] < rests[2]
    assert LONGEST_PAUSE_S * 0.75 <= rests[-1] <= LONGEST_PAUSE_S * 1.25
    held.failed(peer(1), [], "nothing came through", 0.0)
    assert held.due_s(peer(1)) <= 1.25 * hole_punch.FIRST_PAUSE_S  # the first one that did take place


def test_new_addresses_of_either_side_and_success_clear_what_is_remembered() -> None:
    held = memory()
    held.look([PUBLIC], peer(1), [], 0.0)
    for theirs, own in (([PUBLIC], [PUBLIC]), ([], [tcp_addr("45.9.9.9", 1)])):
        held.failed(peer(1), [], "nothing came through", 0.0)
        assert not held.look([PUBLIC], peer(1), [], 1.0)[0]
        assert held.look(own, peer(1), theirs, 1.0)[0]
        held.look([PUBLIC], peer(1), [], 1.0)
    held.failed(peer(1), [], "nothing came through", 0.0)
    held.succeeded(peer(1))
    assert held.look([PUBLIC], peer(1), [], 1.0)[0]


def test_neither_another_port_nor_a_single_witness_makes_us_be_elsewhere() -> None:
    held = memory()
    seen = [tcp_addr("45.3.1.1", port) for port in (7, 8, 9)]
    held.look(hole_punch.place([], seen, HOME), peer(1), [], 0.0)
    held.failed(peer(1), [], "nothing came through", 0.0)
    for witnesses in ([*seen, tcp_addr("45.3.1.1", 10)], [*seen, tcp_addr("45.66.6.6", 1)], seen[1:]):
        assert not held.look(hole_punch.place([], witnesses, HOME), peer(1), [], 1.0)[0]
    moved = [tcp_addr("45.8.1.1", port) for port in (7, 8, 9)]
    assert held.look(hole_punch.place([], moved, HOME), peer(1), [], 1.0)[0]


def test_what_is_offered_begins_with_what_is_surely_ours_and_ends_at_home() -> None:
    seen = [tcp_addr("45.4.1.1", 7), PUBLIC, PUBLIC, tcp_addr("45.5.1.1", 7), HOME[1]]
    candidate = tcp_addr("45.6.1.1", 9)
    offered = to_offer([candidate], seen, [*HOME, tcp_addr("45.7.1.1", 4001)])
    assert offered == [tcp_addr("45.7.1.1", 4001), candidate, PUBLIC, tcp_addr("45.4.1.1", 7), HOME[0]]


@pytest.mark.parametrize(
    ("agent", "as_proposer", "as_other"),
    [
        ("peerd/0.1.0", True, True),
        ("js-libp2p/3.1.0 node/22", True, True),
        ("github.com/learning-at-home/go-libp2p-daemon", True, False),
        ("", True, False),
    ],
)
def test_who_speaks_first_depends_on_who_the_other_is(agent: str, as_proposer: bool, as_other: bool) -> None:
    assert speaks_first(agent, proposed=True) is as_proposer
    assert speaks_first(agent, proposed=False) is as_other


@given(st.integers(0, 10**6), st.integers(0, 1000))
def test_refusals_are_met_quickly_and_silence_never_sooner_than_an_answer(times: int, seed: int) -> None:
    assert 0.005 < refused_pause_s(times, random.Random(seed)) < 0.5
    for rtt_s in (0.0, 0.05, 0.3, 1.0):
        assert silence_s(rtt_s) >= max(0.2, 2 * rtt_s)
    assert hole_punch.FIRST_PAUSE_S > 2 * 5
