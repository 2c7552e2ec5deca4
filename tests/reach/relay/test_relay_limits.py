"""Relay limits: bounds per peer, per place and in total hold for any number of requests."""

from __future__ import annotations

import ipaddress
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.core.addr import Ip, place_of
from peerd.core.keys import Keypair
from peerd.reach.messages.circuit_message import Status
from peerd.reach.relay.relay_limits import Admitted, Granted, Refusal, RelayConfig, RelayServer, overfull
from tests.kit.amount import examples

PEERS = [Keypair.from_seed(bytes([number]) * 32).peer_id for number in range(40)]
HERE = ipaddress.ip_address("198.51.100.1")
ROOMY = RelayConfig(requests_per_place_min=10_000)


def spread(number: int) -> Ip:
    """An address of another region for each number."""
    return ipaddress.ip_address((20 << 24) + (number << 8) + 1)


def test_a_reservation_holds_until_it_expires_or_its_peer_leaves() -> None:
    board = RelayServer(RelayConfig(reservation_s=100))
    assert board.reserve(0, PEERS[0], HERE) == Granted(100, False)
    assert board.reserve(50, PEERS[0], HERE) == Granted(150, True)
    assert (board.holds(149, PEERS[0]), board.holds(150, PEERS[0])) == (True, False)
    board.reserve(150, PEERS[1], HERE)
    board.left(PEERS[1])
    assert (board.holds(151, PEERS[1]), board.holders()) == (False, [])


@pytest.mark.parametrize(
    ("config", "ips", "word"),
    [
        (RelayConfig(reservations=3), [spread(n) for n in range(4)], "this relay"),
        (RelayConfig(reservations_per_place=3), [HERE] * 4, "198.51.100.1"),
        (RelayConfig(reservations_per_region=3), [HERE + n for n in range(4)], "198.51.100.0/24"),
    ],
)
def test_reservations_are_bounded_and_the_refusal_says_by_what(config: RelayConfig, ips: list[Ip], word: str) -> None:
    board = RelayServer(config)
    decisions = [board.reserve(0, peer, ip) for peer, ip in zip(PEERS, ips, strict=False)]
    assert all(isinstance(one, Granted) for one in decisions[:3])
    assert isinstance(refusal := decisions[3], Refusal)
    assert refusal.status == Status.RESERVATION_REFUSED
    assert word in refusal.why
    assert isinstance(board.reserve(0, PEERS[0], ips[0]), Granted)  # who is in may renew
    board.left(PEERS[1])
    assert isinstance(board.reserve(0, PEERS[3], ips[3]), Granted)


def test_spare_reservations_take_half_and_give_way_to_needed_ones() -> None:
    board = RelayServer(RelayConfig(reservations=4))
    spares = [board.reserve(0, PEERS[n], spread(n), spare=True) for n in range(3)]
    assert [isinstance(one, Granted) for one in spares] == [True, True, False]
    needed = [board.reserve(0, PEERS[n], spread(n)) for n in range(10, 15)]
    assert [isinstance(one, Granted) for one in needed] == [True] * 4 + [False]
    assert board.holders() == PEERS[10:14]


def asked(board: RelayServer, source: int, ip: Ip, destination: int) -> str:
    decision = board.connect(0, PEERS[source], ip, PEERS[destination])
    return "" if isinstance(decision, Admitted) else decision.why


@pytest.mark.parametrize(
    ("bound", "asks", "word"),
    [
        ("circuits", [(n, spread(n), 30 + n) for n in range(3)], "this relay"),
        ("circuits_per_source", [(0, spread(n), 30 + n) for n in range(3)], PEERS[0].short),
        ("circuits_per_place", [(n, HERE, 30 + n) for n in range(3)], "198.51.100.1"),
        ("circuits_per_destination", [(n, spread(n), 30) for n in range(3)], PEERS[30].short),
        ("circuits_per_place_and_destination", [(n, HERE, 30) for n in range(3)], "198.51.100.1 to"),
        ("circuits_per_pair", [(0, spread(n), 30) for n in range(3)], "pair"),
    ],
)
def test_circuits_are_bounded_and_the_refusal_says_by_what(
    bound: str, asks: list[tuple[int, Ip, int]], word: str
) -> None:
    board = RelayServer(RelayConfig(**{bound: 2}))  # type: ignore[arg-type]
    for number in range(30, 40):
        board.reserve(0, PEERS[number], spread(number))
    first = board.connect(0, PEERS[asks[0][0]], asks[0][1], PEERS[asks[0][2]])
    assert isinstance(first, Admitted)
    assert asked(board, *asks[1]) == ""
    assert word in asked(board, *asks[2])
    board.ended(first.number)
    assert asked(board, *asks[2]) == ""


def test_nobody_is_connected_to_itself_or_to_a_peer_without_reservation() -> None:
    board = RelayServer(RelayConfig(reservation_s=10))
    board.reserve(0, PEERS[0], HERE)
    statuses = [
        board.connect(now, PEERS[source], HERE, PEERS[destination])
        for now, source, destination in ((0, 0, 0), (0, 0, 1), (10, 1, 0))
    ]
    assert [one.status for one in statuses if isinstance(one, Refusal)] == [
        Status.PERMISSION_DENIED,
        Status.NO_RESERVATION,
        Status.NO_RESERVATION,
    ]


def test_who_asks_too_often_is_refused_until_a_moment_has_passed_and_others_are_not() -> None:
    board = RelayServer(RelayConfig(requests_per_place_min=60))
    granted = [isinstance(board.reserve(0, PEERS[0], HERE), Granted) for _ in range(100)]
    assert sum(granted) == 60
    assert isinstance(board.reserve(0, PEERS[1], spread(1)), Granted)
    assert isinstance(board.reserve(1.001, PEERS[0], HERE), Granted)


def test_places_are_what_one_household_has() -> None:
    for text, place, region in (
        ("198.51.100.7", "198.51.100.7", "198.51.100.0/24"),
        ("2001:db8:1:2::5", "2001:db8:1:2::/64", "2001:db8:1::/48"),
        ("::ffff:198.51.100.7", "198.51.100.7", "198.51.100.0/24"),
    ):
        assert place_of(ipaddress.ip_address(text)) == (place, region)
    assert place_of(None) == place_of(None)


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32))
def test_the_bounds_hold_under_any_schedule(seed: int) -> None:
    rng, now = random.Random(seed), 0.0
    board = RelayServer(
        RelayConfig(
            reservations=8,
            reservations_per_place=2,
            reservations_per_region=3,
            reservation_s=50,
            circuits=10,
            circuits_per_source=3,
            circuits_per_place=4,
            circuits_per_destination=4,
            circuits_per_place_and_destination=2,
            circuits_per_pair=1,
        )
    )
    running: list[int] = []
    for _ in range(200):
        now += rng.expovariate(0.2)
        peer, ip = rng.choice(PEERS), ipaddress.ip_address((20 << 24) + rng.randrange(4) * 256 + rng.randrange(3))
        step = rng.randrange(5)
        if step == 0:
            board.left(peer)
        elif step == 1 and running:
            board.ended(running.pop(rng.randrange(len(running))))
        elif step == 2:
            decision = board.connect(now, peer, ip, rng.choice(PEERS))
            running += [decision.number] if isinstance(decision, Admitted) else []
        else:
            board.reserve(now, peer, ip, spare=rng.random() < 0.5)
        board.check()
        assert board.circuits == len(running)


def test_who_makes_the_relay_hold_most_loses_the_fullest_first() -> None:
    held = [("a", 10), ("b", 40), ("b", 30), ("a", 20), ("c", 50)]
    assert overfull(held, 150) == []
    assert overfull(held, 149) == [1]
    assert overfull(held, 100) == [1, 4]
    assert sorted(overfull(held, 0)) == [0, 1, 2, 3, 4]


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 100)), max_size=30), st.integers(0, 2000))
def test_what_is_held_comes_within_its_bound_and_no_circuit_goes_for_nothing(
    held: list[tuple[str, int]], most: int
) -> None:
    ended = overfull(held, most)
    left = [size for number, (_, size) in enumerate(held) if number not in ended]
    assert len(set(ended)) == len(ended)
    assert sum(left) <= most
    assert not ended or sum(left) + held[ended[-1]][1] > most
