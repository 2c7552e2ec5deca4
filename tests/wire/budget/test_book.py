"""The book of what peers, places and regions have."""

from __future__ import annotations

import random

import pytest
from multiaddr import Multiaddr

from peerd.core.errors import LocalError
from peerd.wire.budget.book import BOUNDS, Book, Bounds, Resource, User, user_at

SMALL = {Resource.LINKS: Bounds(total=40, peer=8, place=10, region=20, reserved=10)}
MEMBER = User("member", "10.0.0.1", "10.0.0.0/24")


def book() -> Book:
    found = Book(SMALL)
    found.members_by(lambda peer: peer.startswith("member"))
    return found


def test_one_peer_has_no_more_than_its_share() -> None:
    some = book()
    assert some.take(Resource.LINKS, User("a", "p", "r"), 8) is None
    assert some.take(Resource.LINKS, User("a", "q", "s")) == "this peer has 8"


def test_identities_of_one_place_share_what_the_place_may_have() -> None:
    some = book()
    for name in "abcde":
        assert some.take(Resource.LINKS, User(name, "p", "r"), 2) is None
    assert some.take(Resource.LINKS, User("f", "p", "r")) == "p has 10"
    assert some.take(Resource.LINKS, User("f", "q", "r")) is None


def test_places_of_one_region_share_what_the_region_may_have() -> None:
    some = book()
    assert some.take(Resource.LINKS, User("a", "p", "r"), 8) is None
    assert some.take(Resource.LINKS, User("b", "q", "r"), 8) is None
    assert some.take(Resource.LINKS, User("c", "o", "r"), 5) == "r has 16"


def test_strangers_leave_what_is_reserved_for_members() -> None:
    some = book()
    for number in range(30):
        assert some.take(Resource.LINKS, User(str(number), str(number), str(number // 20))) is None
    assert some.take(Resource.LINKS, User("x", "x", "x")) == "all together have 30"
    assert some.take(Resource.LINKS, MEMBER, 8) is None
    assert some.take(Resource.LINKS, User("member 2", "10.0.0.1", "10.0.0.0/24"), 3) == "all together have 38"


def test_members_of_one_household_have_half_together_and_some_of_it_whatever_strangers_there_have() -> None:
    some = book()
    assert some.take(Resource.LINKS, User("stranger", "1.0.0.1", "1.0.0.0/24"), 8) is None
    assert some.take(Resource.LINKS, User("another", "1.0.0.1", "1.0.0.0/24"), 2) is None
    for number in range(2):
        assert some.take(Resource.LINKS, User(f"member {number}", "1.0.0.1", "1.0.0.0/24"), 5) is None
    assert some.take(Resource.LINKS, User("member 2", "1.0.0.1", "1.0.0.0/24")) == "1.0.0.1 has 20"
    assert some.take(Resource.LINKS, User("member 2", "1.0.0.2", "1.0.0.0/24"), 8) is None


def test_members_at_one_private_address_leave_a_quarter_to_others() -> None:
    some = book()
    here = [user_at(f"member {number}", Multiaddr("/ip4/127.0.0.1/tcp/1")) for number in range(5)]
    assert [some.take(Resource.LINKS, user, 6) is None for user in here] == [True] * 5
    assert some.take(Resource.LINKS, here[0], 1) == "127.0.0.1 has 30"
    assert some.take(Resource.LINKS, MEMBER, 8) is None


def test_what_was_never_taken_cannot_be_given_back() -> None:
    some = book()
    assert some.take(Resource.LINKS, MEMBER) is None
    some.give(Resource.LINKS, MEMBER)
    with pytest.raises(LocalError):
        some.give(Resource.LINKS, MEMBER)


def test_the_fullest_region_loses_first_and_members_last() -> None:
    some = book()
    a, b, c = User("a", "p", "r"), User("b", "q", "r"), User("c", "z", "s")
    for user, amount in ((a, 4), (b, 5), (c, 8), (MEMBER, 8)):
        assert some.take(Resource.LINKS, user, amount) is None
    order = sorted((MEMBER, a, b, c), key=lambda user: some.fullness(Resource.LINKS, user))
    assert (order[0], order[-1]) == (MEMBER, b)


def test_who_comes_over_a_relay_has_the_relays_place_under_another_name() -> None:
    relay = "/ip4/198.51.100.7/tcp/31337"
    behind = Multiaddr(f"{relay}/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN/p2p-circuit")
    assert user_at("a", Multiaddr(relay)) == User("a", "198.51.100.7", "198.51.100.0/24")
    assert user_at("a", behind) == User("a", "over 198.51.100.7", "over 198.51.100.0/24")


def test_the_book_tells_who_has_most() -> None:
    some = book()
    some.take(Resource.LINKS, User("a", "p", "r"), 3)
    some.take(Resource.LINKS, User("b", "p", "r"), 2)
    (use,) = some.told()
    assert (use.used, use.bounds.total, use.peer, use.place, use.region) == (5, 40, ("a", 3), ("p", 5), ("r", 5))


@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold_whatever_is_taken_and_given(seed: int) -> None:
    rng, some = random.Random(seed), book()
    has: list[tuple[User, int]] = []
    for _ in range(400):
        region = rng.randrange(4)
        user = User(rng.choice(["a", "b", "c", "member 1", "member 2"]), f"{region}.{rng.randrange(3)}", f"{region}")
        amount = rng.randint(1, 6)
        if has and rng.random() < 0.45:
            some.give(Resource.LINKS, *has.pop(rng.randrange(len(has))))
        elif some.take(Resource.LINKS, user, amount) is None:
            has.append((user, amount))
        some.check()
    assert all(some.used(Resource.LINKS, user) >= amount for user, amount in has)


def test_what_a_place_may_have_leaves_room_for_others() -> None:
    for bounds in BOUNDS.values():
        assert bounds.peer <= bounds.total - bounds.reserved
        assert bounds.place < bounds.region < bounds.total - bounds.reserved + 1
