"""The order of a peer's addresses, and when each has its turn."""

from __future__ import annotations

import ipaddress
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from peerd.core.addr import is_relayed, parse_addr, reach, tcp_addr
from peerd.core.keys import Keypair
from peerd.wire.happy_eyeballs import (
    FAILED_LATELY_S,
    GIVE_WAY_S,
    HEAD_START_S,
    NEAR_HEAD_START_S,
    PARALLEL,
    STAGGER_S,
    AddressHistory,
    DropAttempt,
    HappyEyeballs,
    NetworkSurroundings,
    Try,
    Wait,
    order,
)

RELAY = Keypair.from_seed(bytes(32)).peer_id
HERE, NEAR, ELSEWHERE = (tcp_addr(ip, 4001) for ip in ("127.0.0.1", "192.168.1.5", "10.7.0.5"))
FOUR, FOUR_B, SIX = (tcp_addr(ip, 4001) for ip in ("8.8.8.8", "8.8.4.4", "2600::8"))
NAME = parse_addr("/dns/peer.example.org/tcp/4001")
RELAYED = parse_addr(f"/ip4/9.9.9.9/tcp/4001/p2p/{RELAY}/p2p-circuit")
HOME = NetworkSurroundings(networks=(ipaddress.IPv4Network("192.168.1.0/24"),))


def ordered(*addrs: Multiaddr, around: NetworkSurroundings = HOME, now: float = 0.0) -> list[Multiaddr]:
    return order({addr: AddressHistory() for addr in addrs}, around, now)


def test_kinds_take_turns_the_same_network_first_ipv6_before_ipv4_and_relays_last() -> None:
    found = ordered(RELAYED, ELSEWHERE, NAME, FOUR_B, FOUR, SIX, NEAR, HERE)
    assert found == [HERE, NEAR, SIX, FOUR_B, NAME, ELSEWHERE, FOUR, RELAYED]


def test_a_private_address_counts_as_near_where_our_own_networks_are_unknown() -> None:
    assert ordered(FOUR, ELSEWHERE, around=NetworkSurroundings()) == [ELSEWHERE, FOUR]


def test_the_same_private_network_behind_another_router_is_not_near() -> None:
    behind = {"networks": HOME.networks}
    same = NetworkSurroundings(**behind, public=frozenset({ipaddress.ip_address("8.8.8.8")}))
    other = NetworkSurroundings(**behind, public=frozenset({ipaddress.ip_address("9.1.1.1")}))
    assert ordered(FOUR, NEAR, around=same) == [NEAR, FOUR]
    assert ordered(FOUR, NEAR, around=other) == [FOUR, NEAR]
    assert ordered(SIX, NEAR, around=other) == [NEAR, SIX]  # the peer's IPv4 address is unknown


def test_what_worked_comes_first_the_latest_before_the_others_but_never_a_relay_before_a_direct_way() -> None:
    known = {FOUR: AddressHistory(1), SIX: AddressHistory(), RELAYED: AddressHistory(3), NEAR: AddressHistory(2)}
    assert order(known, HOME, 0.0) == [NEAR, FOUR, SIX, RELAYED]


def test_what_failed_lately_comes_after_relays_and_is_forgiven_in_time() -> None:
    known = {
        NEAR: AddressHistory(failed_s=60.0),
        FOUR: AddressHistory(1, failed_s=50.0),
        SIX: AddressHistory(),
        RELAYED: AddressHistory(),
    }
    assert order(known, HOME, 61.0) == [SIX, RELAYED, FOUR, NEAR]
    assert order(known, HOME, 60.0 + FAILED_LATELY_S) == [FOUR, NEAR, SIX, RELAYED]


def test_where_we_listen_ourselves_is_the_last_place_to_look_for_another() -> None:
    around = NetworkSurroundings(networks=HOME.networks, listening=frozenset({NEAR}))
    assert ordered(NEAR, RELAYED, FOUR, around=around) == [FOUR, RELAYED, NEAR]


def test_the_next_address_has_its_turn_after_a_step_or_when_one_failed() -> None:
    race, addrs = HappyEyeballs(5.0), [NEAR, SIX, FOUR]
    assert race.next(5.0, addrs) == Try(NEAR)
    assert race.next(5.0, addrs) == Wait(5.0 + STAGGER_S)
    race.ended(5.1, NEAR)
    assert race.next(5.1, addrs) == Try(SIX)
    assert race.next(5.1 + STAGGER_S, addrs) == Try(FOUR)
    assert race.next(9.0, addrs) == Wait(math.inf)


@pytest.mark.parametrize("failing", [False, True])
def test_a_relay_waits_for_direct_ways_to_fail_or_to_have_had_their_head_start(failing: bool) -> None:
    race, addrs = HappyEyeballs(0.0), [FOUR, RELAYED]
    assert race.next(0.0, addrs) == Try(FOUR)
    assert race.next(STAGGER_S, addrs) == Wait(HEAD_START_S)
    if failing:
        race.ended(0.4, FOUR)
        assert race.next(0.4, addrs) == Try(RELAYED)
    else:
        assert race.next(HEAD_START_S, addrs) == Try(RELAYED)


def test_a_relay_waits_less_for_private_addresses_whose_hosts_answer_at_once_or_never() -> None:
    race, addrs = HappyEyeballs(0.0), [NEAR, RELAYED]
    assert race.next(0.0, addrs) == Try(NEAR)
    assert race.next(0.0, addrs) == Wait(NEAR_HEAD_START_S)
    assert race.next(NEAR_HEAD_START_S, addrs) == Try(RELAYED)


def test_a_peer_that_has_relayed_addresses_only_is_not_kept_waiting() -> None:
    assert HappyEyeballs(0.0).next(0.0, [RELAYED]) == Try(RELAYED)


def test_where_all_places_are_taken_the_oldest_gives_way_after_a_while() -> None:
    addrs = [tcp_addr(f"8.8.8.{number}", 1) for number in range(PARALLEL + 1)]
    race = HappyEyeballs(0.0)
    for number in range(PARALLEL):
        assert race.next(number * STAGGER_S, addrs) == Try(addrs[number])
    assert race.next(PARALLEL * STAGGER_S, addrs) == Wait(GIVE_WAY_S)
    assert race.next(GIVE_WAY_S, addrs) == DropAttempt(addrs[0])
    assert race.next(GIVE_WAY_S, addrs) == Wait(math.inf)
    race.ended(GIVE_WAY_S, addrs[0])
    assert race.next(GIVE_WAY_S, addrs) == Try(addrs[PARALLEL])


ADDRS = [HERE, NEAR, ELSEWHERE, FOUR, FOUR_B, SIX, NAME, RELAYED, *(tcp_addr("8.8.8.8", port) for port in range(8))]


@given(
    st.permutations(ADDRS),
    st.lists(st.one_of(st.none(), st.sampled_from([0.05, 0.5, 3.0])), min_size=len(ADDRS), max_size=len(ADDRS)),
)
def test_every_address_is_tried_once_in_bounded_time_and_never_more_at_once_than_allowed(
    addrs: list[Multiaddr], fails_after_s: list[float | None]
) -> None:
    race, now = HappyEyeballs(0.0), 0.0
    life = dict(zip(addrs, fails_after_s, strict=True))
    running: dict[Multiaddr, float] = {}
    tried: list[Multiaddr] = []
    while True:
        step = race.next(now, addrs)
        if isinstance(step, Try):
            if is_relayed(step.addr):
                direct = [addr for addr in running if not is_relayed(addr)]
                assert not direct or now >= NEAR_HEAD_START_S
                assert not [addr for addr in direct if reach(addr) == 2] or now >= HEAD_START_S
            tried.append(step.addr)
            running[step.addr] = now + (life[step.addr] or math.inf)
        elif isinstance(step, DropAttempt):
            del running[step.addr]
            race.ended(now, step.addr)
        else:
            first = min(running, key=lambda addr: running[addr], default=None)
            if first is not None and running[first] <= step.until_s and running[first] < math.inf:
                now = max(now, running.pop(first))
                race.ended(now, first)
            elif step.until_s == math.inf:
                break
            else:
                assert step.until_s > now
                now = step.until_s
        assert len(running) <= PARALLEL
    assert tried == addrs
    assert now <= 3 * GIVE_WAY_S
