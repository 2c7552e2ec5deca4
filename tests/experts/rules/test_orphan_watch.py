"""Who holds an expert's checkpoint and who adopts it: the same order for all, and nothing too early."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from peerd.core.ids import PeerId
from peerd.experts.rules.orphan_watch import HolderRoom, OrphanWatch, SeenClaim, choose_holders, in_turn
from peerd.run.grid import Uid

UID = Uid(0, (1, 2))
P = 10.0


def peer(name: object) -> PeerId:
    return PeerId.from_public_key(hashlib.sha256(str(name).encode()).digest())


PEERS = st.lists(st.integers(0, 30).map(peer), min_size=1, max_size=12, unique=True)


@given(PEERS, st.randoms())
def test_the_order_of_peers_does_not_depend_on_who_asks(peers: list[PeerId], rng: object) -> None:
    shuffled = list(peers)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert in_turn(UID, peers) == in_turn(UID, shuffled)
    without = [p for p in in_turn(UID, peers) if p != shuffled[0]]
    assert in_turn(UID, shuffled[1:]) == without  # nobody else's place changes


def test_the_experts_of_one_host_spread_over_all_others() -> None:
    peers = [peer(i) for i in range(8)]
    first = {in_turn(Uid(0, (i, j)), peers)[0] for i in range(8) for j in range(8)}
    assert first == set(peers)


@given(PEERS, st.data())
def test_holders_are_others_with_room_and_each_place_comes_once_before_any_comes_again(
    peers: list[PeerId], data: st.DataObject
) -> None:
    offers = [HolderRoom(p, data.draw(st.integers(0, 3)), data.draw(st.sampled_from(["a", "b", "c"]))) for p in peers]
    own = HolderRoom(peers[0], 9, "a")
    chosen = choose_holders(UID, own, offers, 2)
    rooms = {o.peer: o for o in offers}
    assert set(chosen) == {o.peer for o in offers if o.room_bytes >= 2 and o.peer != own.peer}
    seen = ["a", *(rooms[p].place for p in chosen)]
    for n in range(1, len(seen)):
        least = min(seen[:n].count(place) for place in seen[n:])
        assert seen[:n].count(seen[n]) == least


def claim(until: float = 100.0, generation: int = 1, version: int = 5, of: str = "owner") -> SeenClaim:
    return SeenClaim(peer(of), generation, version, until)


def test_a_claim_that_is_renewed_is_never_doubtful() -> None:
    watch = OrphanWatch(P)
    assert not any(watch.is_doubtful(t, UID, claim(until=t - t % P)) for t in range(200))


def test_a_claim_that_is_not_renewed_is_doubtful_and_an_orphan_only_if_its_host_is_silent() -> None:
    watch = OrphanWatch(P)
    assert not watch.is_doubtful(0, UID, claim())
    assert not watch.is_doubtful(10.9, UID, claim())
    assert watch.is_doubtful(11.0, UID, claim())
    assert watch.orphan_since(UID, answers=True) == float("inf")
    assert watch.orphan_since(UID, answers=False) == 11.0


def test_an_expert_without_a_claim_is_left_longer_to_a_host_that_answers() -> None:
    watch = OrphanWatch(P)
    watch.is_doubtful(0, UID, claim())
    assert not watch.is_doubtful(3, UID, None)
    assert watch.is_doubtful(8, UID, None)
    assert watch.orphan_since(UID, answers=False) == 8.0
    assert watch.orphan_since(UID, answers=True) == 23.0
    assert watch.last(UID) == claim()


def test_adopters_come_one_after_the_other_and_three_of_them_within_two_periods() -> None:
    watch = OrphanWatch(P)
    order = in_turn(UID, [peer(i) for i in range(4)])
    since = 12.5  # when the last look before saw the claim as late as it could be

    def first_moment(p: PeerId) -> float:
        others = {q: f"place of {q}" for q in order if q != p}
        return next(t / 4 for t in range(200) if watch.may_adopt(t / 4, UID, since, p, others))

    moments = [first_moment(p) for p in order]
    assert moments == sorted(set(moments))
    assert moments[2] <= 2 * P
