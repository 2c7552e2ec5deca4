"""Network coordinates: times of pairs that were never measured come out about right, and one wrong time does little."""

from __future__ import annotations

import random

from peerd.pipeline.routes.coordinates import Coordinates

PLACES = {"oregon": (0.0, 0.0), "virginia": (60.0, 0.0), "london": (120.0, 40.0), "tokyo": (-90.0, 30.0)}
PEERS = {f"{place}{number}": at for place, at in PLACES.items() for number in range(5)}


def far_s(one: str, other: str) -> float:
    (ax, ay), (bx, by) = PEERS[one], PEERS[other]
    return 0.01 + ((ax - bx) ** 2 + (ay - by) ** 2) ** 0.5 / 1e3


def learned(rng: random.Random) -> Coordinates:
    """Each peer was measured to a few others, many times."""
    one = Coordinates(random.Random(1))
    pairs = [(a, b) for a in PEERS for b in rng.sample(sorted(PEERS), 6) if a != b]
    for a, b in 40 * pairs:
        one.measured(a, b, far_s(a, b))
    return one


def test_pairs_that_were_never_measured_are_guessed() -> None:
    one = learned(random.Random(2))
    off = sorted(abs((one.between_s(a, b) or 0.0) / far_s(a, b) - 1.0) for a in PEERS for b in PEERS if a != b)
    assert off[len(off) // 2] < 0.15
    assert off[9 * len(off) // 10] < 1.0


def test_nothing_is_guessed_of_a_peer_that_was_never_met_or_has_gone() -> None:
    one = learned(random.Random(2))
    assert one.between_s("tokyo0", "paris") is None
    one.keep_only({"tokyo0"})
    assert len(one) == 1
    assert one.between_s("tokyo0", "oregon0") is None


def test_one_wrong_time_moves_two_points_by_a_share() -> None:
    one = learned(random.Random(2))
    before = one.between_s("tokyo1", "oregon1") or 0.0
    one.measured("tokyo0", "oregon0", 100.0)
    assert one.between_s("tokyo1", "oregon1") == before
    for _ in range(200):
        for other in list(PEERS)[:15]:
            one.measured("tokyo0", other, far_s("tokyo0", other))
    assert (one.between_s("tokyo0", "london0") or 0.0) < 2 * far_s("tokyo0", "london0")


def test_the_same_place_is_near() -> None:
    one = Coordinates(random.Random(1))
    for _ in range(50):
        one.measured("a", "b", 0.0)
    assert (one.between_s("a", "b") or 0.0) < 0.01
