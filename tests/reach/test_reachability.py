"""The verdict on reachability: right for each kind of router, and a single liar among several never turns it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from peerd.core.addr import tcp_addr
from peerd.core.keys import Keypair
from peerd.core.limits import OBSERVERS
from peerd.reach.network_votes import majority, votes
from peerd.reach.reachability import AskDialBack, Kind, ObservedAddr, Reachability, ReachabilityVerdict, advice

PORT = 31337
INSIDE = tcp_addr("192.168.1.7", PORT)
OUTSIDE = tcp_addr("81.2.3.4", PORT)
MAPPED = tcp_addr("81.2.3.4", 40000)
LIE = tcp_addr("66.6.6.6", 666)
PEERS = [Keypair.from_seed(bytes([number]) * 32).peer_id for number in range(12)]


def network(number: int, host: int = 1) -> Multiaddr:
    """The address of a peer in a network of its own."""
    return tcp_addr(f"{90 + number}.5.0.{host}", 4001)


def sight(number: int, seen: Multiaddr | None, **other: object) -> ObservedAddr:
    facts: dict[str, object] = {"at": network(number), "mapped": True, "accepted": False, "tests": True} | other
    return ObservedAddr(peer=PEERS[number], seen=seen, **facts)  # type: ignore[arg-type]


def machine(*own: Multiaddr, seed: int = 1) -> Reachability:
    made = Reachability(random.Random(seed))
    made.own(own)
    return made


def settle(
    judge: Reachability, now: float, got_in: Sequence[Multiaddr], liars: Sequence[int] = ()
) -> ReachabilityVerdict:
    """Have all questions answered: a stranger gets in at `got_in`, and liars say the opposite."""
    while asks := judge.step(now):
        for ask in asks:
            found = next((addr for addr in ask.addrs if addr in got_in), None)
            if PEERS.index(ask.peer) in liars:
                found = ask.addrs[0] if found is None else None
            judge.answered(now, ask.peer, tried=True, proven=found)
            judge.check()
    judge.step(now + 5.0)
    judge.check()
    return judge.finding


def test_nobody_from_outside_means_unknown_and_nobody_is_asked() -> None:
    judge = machine(INSIDE)
    judge.saw(0.0, ObservedAddr(PEERS[0], tcp_addr("192.168.1.9", 5), INSIDE, True, False, True))
    assert judge.step(0.0) == []
    assert (judge.finding.kind, judge.finding.needs_relays) == (Kind.UNKNOWN, False)
    assert "outside" in judge.finding.why


@pytest.mark.parametrize(
    ("own", "seen", "got_in", "kind"),
    [
        ([OUTSIDE], [OUTSIDE] * 3, [OUTSIDE], Kind.REACHABLE),
        ([OUTSIDE], [OUTSIDE] * 3, [], Kind.FIREWALL),
        ([INSIDE], [MAPPED] * 3, [], Kind.KEEPS_PORTS),
        ([INSIDE], [MAPPED] * 3, [MAPPED], Kind.REACHABLE),
        ([INSIDE], [tcp_addr("81.2.3.4", 40000 + n) for n in range(3)], [], Kind.SYMMETRIC),
        ([INSIDE], [tcp_addr("81.2.3.4", 40000 + n) for n in range(3)], [OUTSIDE], Kind.REACHABLE),  # forwarded
    ],
    ids=["public", "firewall", "port-restricted", "full-cone", "symmetric", "forwarded"],
)
def test_each_kind_is_recognised(
    own: list[Multiaddr], seen: list[Multiaddr], got_in: list[Multiaddr], kind: Kind
) -> None:
    judge = machine(*own)
    for number, addr in enumerate(seen):
        judge.saw(0.0, sight(number, addr))
    found = settle(judge, 0.0, got_in)
    assert found.kind == kind
    assert found.proven == tuple(got_in)
    assert found.needs_relays == (got_in != [OUTSIDE] or own != [OUTSIDE])
    assert found.dead == (tuple(own) if kind == Kind.FIREWALL else ())


def test_three_are_asked_at_once_and_first_those_in_different_networks() -> None:
    judge = machine(OUTSIDE)
    for number in range(6):
        judge.saw(0.0, sight(number, OUTSIDE, at=network(0, number + 1)))
    for number in range(6, 12):
        judge.saw(0.0, sight(number, OUTSIDE))
    asked = judge.step(0.0)
    assert len(asked) == 3
    places = [str(network(0)) if PEERS.index(ask.peer) < 6 else str(network(PEERS.index(ask.peer))) for ask in asked]
    assert len(set(places)) >= 3
    assert judge.step(0.0) == []


def test_the_first_verdict_waits_for_those_who_were_asked_but_not_for_long() -> None:
    judge = machine(OUTSIDE)
    for number in range(3):
        judge.saw(0.0, sight(number, OUTSIDE))
    asks = judge.step(0.0)
    judge.answered(0.1, asks[0].peer, tried=True)
    judge.step(0.1)
    assert judge.finding.kind == Kind.UNKNOWN
    assert judge.wake_at(0.1) < 5.0
    judge.step(judge.wake_at(0.1))
    assert judge.finding.kind == Kind.FIREWALL
    for ask in asks[1:]:
        judge.answered(4.5, ask.peer, tried=True, proven=OUTSIDE)
    judge.step(4.5)
    assert judge.finding.kind == Kind.REACHABLE


def test_an_answer_about_what_was_never_asked_does_not_count() -> None:
    judge = machine(INSIDE)
    judge.saw(0.0, sight(0, MAPPED))
    [ask] = judge.step(0.0)
    assert LIE not in ask.addrs
    judge.answered(0.0, ask.peer, tried=True, proven=LIE)
    judge.answered(0.0, PEERS[5], tried=True, proven=MAPPED)  # nobody asked it
    judge.step(0.0)
    assert judge.finding.kind == Kind.UNKNOWN


def test_a_peer_that_would_not_say_is_left_alone_and_another_is_asked() -> None:
    judge = machine(OUTSIDE)
    judge.saw(0.0, sight(0, OUTSIDE))
    [ask] = judge.step(0.0)
    judge.answered(0.0, ask.peer, tried=False)
    assert judge.step(1.0) == []
    judge.saw(1.0, sight(1, OUTSIDE))
    assert [one.peer for one in judge.step(1.0)] == [PEERS[1]]
    assert judge.wake_at(1.0) <= 60.0


def test_answers_are_refreshed_and_another_address_is_asked_about_soon() -> None:
    judge = machine(INSIDE)
    judge.saw(0.0, sight(0, MAPPED))
    settle(judge, 0.0, [])
    assert judge.step(100.0) == []
    assert judge.wake_at(100.0) == 300.0
    judge.saw(100.0, sight(0, tcp_addr("82.9.9.9", PORT)))
    [ask] = judge.step(100.0)
    assert ask.addrs == (tcp_addr("82.9.9.9", PORT),)
    judge.answered(100.0, ask.peer, tried=True)
    judge.step(100.0)
    assert judge.wake_at(100.0) == 400.0


def test_an_address_that_a_router_promises_meanwhile_is_asked_about_soon() -> None:
    """The router often answers after the first peers were asked, and before they have answered."""
    judge = machine(INSIDE)
    judge.saw(0.0, sight(0, MAPPED))
    [ask] = judge.step(0.0)
    judge.own([INSIDE], [OUTSIDE])
    assert judge.step(1.0) == []
    judge.answered(2.0, ask.peer, tried=True)
    judge.step(2.0)
    assert judge.wake_at(2.0) == 20.0
    [again] = judge.step(20.0)
    assert OUTSIDE in again.addrs
    judge.answered(21.0, again.peer, tried=True, proven=OUTSIDE)
    judge.step(21.0)
    assert (judge.finding.kind, judge.wake_at(21.0)) == (Kind.REACHABLE, 320.0)


def test_a_machine_that_has_moved_asks_everybody_at_once_and_keeps_its_verdict_until_they_say_otherwise() -> None:
    judge = machine(INSIDE)
    for number in range(3):
        judge.saw(0.0, sight(number, MAPPED))
    settle(judge, 0.0, [MAPPED])
    judge.moved()
    asks = judge.step(6.0)
    assert (len(asks), judge.finding.kind) == (3, Kind.REACHABLE)
    for ask in asks:
        judge.answered(7.0, ask.peer, tried=True)
    assert judge.step(7.0) == []
    assert judge.finding.kind == Kind.KEEPS_PORTS


def test_what_was_proven_under_an_address_that_is_gone_is_not_announced_any_longer() -> None:
    judge = machine(INSIDE)
    for number in range(3):
        judge.saw(0.0, sight(number, MAPPED))
    assert settle(judge, 0.0, [MAPPED]).proven == (MAPPED,)
    for number in range(3):
        judge.lost(10.0, PEERS[number])
        judge.saw(10.0, sight(number, tcp_addr("82.9.9.9", 7)))
    assert judge.step(10.0) == []  # they were asked just now
    assert judge.finding.proven == ()
    assert len(judge.step(20.0)) == 3


def test_candidates_need_two_networks_where_there_is_more_than_one() -> None:
    judge = machine(INSIDE)
    judge.saw(0.0, sight(0, MAPPED))
    judge.step(0.0)
    assert judge.finding.candidates == (MAPPED,)  # the only word there is
    judge.saw(0.0, sight(1, LIE))
    judge.step(0.0)
    assert judge.finding.candidates == ()
    judge.saw(0.0, sight(2, MAPPED))
    judge.step(0.0)
    assert judge.finding.candidates == (MAPPED,)


def test_many_identities_in_one_network_have_one_voice() -> None:
    judge = machine(INSIDE)
    for number in range(8):
        judge.saw(0.0, sight(number, LIE, at=network(0, number + 1)))
    for number in range(8, 10):
        judge.saw(0.0, sight(number, MAPPED))
    judge.step(0.0)
    assert judge.finding.candidates == (MAPPED,)


def test_a_lonely_public_peer_is_reachable_because_strangers_come_in() -> None:
    judge = machine(OUTSIDE)
    judge.saw(0.0, sight(0, OUTSIDE, tests=False, accepted=True))
    judge.step(0.0)
    assert (judge.finding.kind, judge.finding.proven) == (Kind.REACHABLE, (OUTSIDE,))


def test_one_network_cannot_make_a_public_peer_hide_its_address_while_others_come_in() -> None:
    judge = machine(OUTSIDE)
    judge.saw(0.0, sight(0, OUTSIDE))
    for number in (1, 2):
        judge.saw(0.0, sight(number, OUTSIDE, tests=False, accepted=True))
    found = settle(judge, 0.0, [OUTSIDE], liars=[0])
    assert (found.kind, found.dead) == (Kind.REACHABLE, ())


def test_private_addresses_are_never_candidates_whatever_peers_say() -> None:
    judge = machine(INSIDE)
    for number in range(3):
        judge.saw(0.0, sight(number, tcp_addr("10.1.2.3", PORT)))
    asks = judge.step(0.0)
    assert asks == []
    assert (judge.finding.candidates, judge.finding.proven) == ((), ())


def test_a_peer_that_does_not_listen_says_so() -> None:
    judge = machine()
    judge.saw(0.0, sight(0, MAPPED))
    assert judge.step(0.0) == []
    assert (judge.finding.kind, judge.finding.needs_relays) == (Kind.DEAF, True)


def test_a_flood_of_observers_is_bounded() -> None:
    judge = machine(INSIDE)
    for number in range(OBSERVERS + 50):
        peer = Keypair.from_seed(number.to_bytes(32, "big")).peer_id
        judge.saw(0.0, ObservedAddr(peer, network(number % 100), MAPPED, True, False, True))
        judge.check()
    assert len(judge.step(0.0)) == 3


def test_peers_that_answer_and_leave_are_remembered_up_to_a_bound() -> None:
    judge = machine(INSIDE)
    for number in range(OBSERVERS + 50):
        peer, now = Keypair.from_seed(number.to_bytes(32, "big")).peer_id, number / 10
        judge.saw(now, ObservedAddr(peer, network(number % 30), MAPPED, True, False, True))
        assert [ask.peer for ask in judge.step(now)] == [peer]
        judge.answered(now, peer, tried=True)
        judge.lost(now, peer)
        judge.check()
    judge.step(now + 1.0)
    assert f"({OBSERVERS} asked)" in judge.finding.why


def test_a_crowd_of_observers_pushes_nobody_out_but_its_own() -> None:
    judge = machine(INSIDE)
    for number in (0, 1):
        judge.saw(0.0, sight(number, MAPPED))
    for number in range(OBSERVERS + 50):
        peer = Keypair.from_seed((number + 1000).to_bytes(32, "big")).peer_id
        judge.saw(1.0, ObservedAddr(peer, network(7, number % 250 + 1), LIE, True, False, False))
    judge.step(1.0)
    judge.check()
    assert judge.finding.candidates == (MAPPED,)


V6 = tcp_addr("2a01:4f8::7", PORT)


@pytest.mark.parametrize(
    ("got_in", "kind", "dead"),
    [([], Kind.KEEPS_PORTS, (V6,)), ([V6], Kind.REACHABLE, ()), ([MAPPED], Kind.REACHABLE, (V6,))],
    ids=["neither", "IPv6 only", "IPv4 only"],
)
def test_each_ip_version_is_judged_by_itself(got_in: list[Multiaddr], kind: Kind, dead: tuple[Multiaddr, ...]) -> None:
    judge = machine(INSIDE, V6)
    judge.saw(0.0, sight(0, MAPPED))
    judge.saw(0.0, sight(1, MAPPED))
    for number in (2, 3):
        judge.saw(0.0, sight(number, V6, at=tcp_addr(f"2a0{number}:b00::1", 4001)))
    found = settle(judge, 0.0, got_in)
    found = settle(judge, 25.0, got_in)
    assert (found.kind, found.proven, found.dead) == (kind, tuple(got_in), dead)
    assert found.needs_relays  # an address of IPv6 alone does not serve everybody


def test_an_address_that_nobody_was_asked_about_is_not_dead() -> None:
    judge = machine(INSIDE, V6)
    for number in range(3):
        judge.saw(0.0, sight(number, MAPPED))
    found = settle(judge, 0.0, [])
    assert (found.kind, found.dead) == (Kind.KEEPS_PORTS, ())


@given(
    st.sampled_from(["public", "firewall", "cone", "restricted", "symmetric"]),
    st.integers(3, 7),
    st.integers(0, 6),
    st.randoms(use_true_random=False),
)
def test_a_single_liar_never_turns_the_verdict(kind: str, peers: int, liar: int, rng: random.Random) -> None:
    own = OUTSIDE if kind in ("public", "firewall") else INSIDE
    seen = {"public": OUTSIDE, "firewall": OUTSIDE}.get(kind, MAPPED)
    got_in = {"public": [OUTSIDE], "cone": [MAPPED]}.get(kind, [])
    judge = machine(own, seed=rng.randrange(1 << 30))
    liar %= peers
    order = list(range(peers))
    rng.shuffle(order)
    for number in order:
        addr = tcp_addr("81.2.3.4", 50000 + number) if kind == "symmetric" else seen
        judge.saw(0.0, sight(number, LIE if number == liar else addr))
    found = settle(judge, 0.0, got_in, [liar])
    told = {"public": Kind.REACHABLE, "cone": Kind.REACHABLE, "firewall": Kind.FIREWALL, "symmetric": Kind.SYMMETRIC}
    assert found.kind == told.get(kind, Kind.KEEPS_PORTS)
    assert LIE not in (*found.proven, *found.candidates)


STEPS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 11), st.sampled_from([None, MAPPED, LIE, OUTSIDE, INSIDE])),
    max_size=40,
)


@given(STEPS, st.integers(0, 1 << 30))
def test_the_invariants_hold_in_any_order_of_events(steps: list[tuple[int, int, Multiaddr | None]], seed: int) -> None:
    judge, now, asked = machine(INSIDE, seed=seed), 0.0, list[AskDialBack]()
    for what, number, addr in steps:
        now += number * 7.0
        if what == 0:
            judge.lost(now, PEERS[number])
        elif what == 1:
            judge.own([INSIDE] if addr is None else [addr], [OUTSIDE] if number % 2 else [])
        elif what == 2 and asked:
            judge.answered(now, asked.pop(number % len(asked)).peer, tried=addr is not None, proven=addr)
        else:
            judge.saw(now, sight(number, addr, tests=bool(number % 3), accepted=what == 5))
        asked += judge.step(now)
        assert judge.step(now) == []
        assert judge.wake_at(now) > now
        judge.check()
        known = {addr for ask in asked for addr in ask.addrs} | {OUTSIDE, MAPPED, LIE}
        assert set(judge.finding.proven) <= known | {tcp_addr("66.6.6.6", PORT)}


def test_votes_are_shared_inside_a_network_and_a_majority_is_more_than_half() -> None:
    told = [(network(0, 1), "a"), (network(0, 1), "b"), (network(0, 2), "b"), (network(1), "a")]
    assert votes(told) == {"a": 1.25, "b": 0.75}
    assert majority(told) == "a"
    assert majority([(network(0), "a"), (network(1), "b")]) is None
    assert majority([]) is None


def test_advice_is_in_the_words_of_people() -> None:
    def told(kind: Kind, relays: int) -> str:
        return advice(ReachabilityVerdict(kind, "because"), 31337, relays)

    assert told(Kind.REACHABLE, 0) == "reachable"
    assert told(Kind.KEEPS_PORTS, 2) == "behind a port-restricted NAT: direct connections by hole punching"
    assert told(Kind.SYMMETRIC, 2) == "only through relays: forward TCP port 31337 for full speed"
    assert told(Kind.SYMMETRIC, 0).startswith("only by connecting to others")
    assert "open TCP port 31337" in told(Kind.FIREWALL, 1)
    assert "until a relay is found" in told(Kind.KEEPS_PORTS, 0)
    assert told(Kind.UNKNOWN, 0) == "whether others can connect is not known yet: because"
