"""Hostile peers beside the owner of an expert: what they claim and sign moves neither hosts nor those that follow."""

from __future__ import annotations

import pytest

from peerd.core.ids import PeerId
from peerd.experts.owners.owner_tree import KeptCopy
from peerd.experts.rules.orphan_watch import SeenClaim
from peerd.run.grid import Uid
from tests.experts.owners.test_lineage import UID, P, Scene, of_a, peer, pointer


def host_of(generation: int, *, name: str = "a", former: str = "c") -> Scene:
    """A scene of a host that has owned the expert for long, with two holders."""
    scene = Scene(name)
    before = pointer(former, 0, 10)
    scene.lineages.took(0.0, UID, generation, before.as_former())
    scene.lineages.hosted = lambda _: generation
    scene.keep(pointer(name, generation, 40, after=before), "x", "y")
    for _ in range(300 * 4):
        scene.look((name, generation), renewed=name)
    return scene


# --- voices ----------------------------------------------------------------------------------------------------------


def test_a_host_does_not_yield_to_an_unlinked_stranger_with_as_many_voices() -> None:
    scene = host_of(3)
    scene.keep(pointer("s", 0, 1), "e1", "e2")
    for _ in range(10):
        assert scene.look(("a", 3), ("s", 0), renewed="as")[:2] == ("a", 3)
    scene.keep(pointer("s", 0, 2), "e3")
    assert scene.look(("a", 3), ("s", 0), renewed="as")[:2] == ("s", 0), "more networks outvote an owner"


def test_more_identities_in_as_many_networks_do_not_outvote_a_living_host() -> None:
    crowd = [f"crowd{i}" for i in range(9)]
    scene = host_of(3)
    scene.lineages._seat = lambda who: "one" if who in set(map(peer, crowd)) else who.text
    scene.keep(pointer("s", 0, 1), "e1", *crowd)
    for _ in range(10):
        assert scene.look(("a", 3), ("s", 0), renewed="as")[:2] == ("a", 3)


# --- hand-overs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", ["a", "watcher"])
def test_a_hand_over_that_was_refused_is_void_once_the_owner_signs_another_update(own: str) -> None:
    scene = Scene(own)
    scene.lineages.hosted = lambda _: 0 if own == "a" else None
    scene.keep(pointer("a", 0, 51), "x", "y")
    scene.look(("a", 0), renewed="a")
    scene.keep(pointer("s", 1, 51, after=pointer("a", 0, 50, heir="s")))
    for _ in range(20):
        assert scene.look(("a", 0), ("s", 1), renewed="as")[:2] == ("a", 0)


def test_a_hand_over_that_was_refused_is_void_once_the_owner_announces_another_update() -> None:
    scene, _ = of_a()  # whose announcement says 40 updates
    scene.keep(pointer("s", 1, 39, after=pointer("a", 0, 39, heir="s")))
    for _ in range(20):
        assert scene.look(("a", 0), ("s", 1), renewed="as")[:2] == ("a", 0)


# --- crowds ----------------------------------------------------------------------------------------------------------


def crowded(scene: Scene, count: int = 80) -> None:
    """One network with several peers, all of which hold checkpoints of many owners that one of them made up."""
    crowd = [peer(f"crowd{i}") for i in range(3)]
    scene.lineages._seat = lambda who: "one" if who in {*crowd, peer("s")} else who.text
    for number in range(count):
        made = pointer("s", 1000 + number, 1)
        scene.copies.append(KeptCopy(made, [made.peer, *crowd]))
    scene.copies.sort(key=lambda copy: copy.pointer.rank, reverse=True)


def test_owners_made_up_in_one_network_crowd_the_owner_out_of_no_newcomers_sight() -> None:
    scene = Scene()
    scene.keep(pointer("a"), "x", "y")
    crowded(scene)
    assert scene.look(("a", 0), renewed="a")[0] == "a"


def test_owners_made_up_in_one_network_crowd_out_no_heir() -> None:
    scene, made = of_a()
    crowded(scene)
    scene.look()
    scene.look(after_s=P)
    scene.keep(pointer("b", 1, 40, after=made))
    assert scene.look(("b", 1), renewed="b")[:2] == ("b", 1)


@pytest.mark.parametrize("linked", [False, True])
def test_the_network_of_a_peer_is_looked_up_once_in_a_look_however_many_claim_the_expert(linked: bool) -> None:
    scene, asked = Scene("a"), list[PeerId]()
    before = pointer("c", 0, 10)
    scene.lineages.took(0.0, UID, 1, before.as_former())
    scene.lineages.hosted = lambda _: 1
    mine = scene.keep(pointer("a", 1, 40, after=before), *[f"h{i}" for i in range(50)])
    scene.look(("a", 1), renewed="a")
    rivals = [f"r{i}" for i in range(60)]
    for name in rivals if linked else ():
        scene.keep(pointer(name, 2, 41, after=mine), "h0")

    def seat(who: PeerId) -> str:
        asked.append(who)
        return who.text

    scene.lineages._seat = seat
    scene.look(("a", 1), *[(name, 2) for name in rivals], renewed=["a", *rivals])
    assert len(asked) == len(set(asked)) <= 1 + 50 + 60


@pytest.mark.parametrize("own", ["a", "watcher"])
def test_no_network_is_looked_up_while_nobody_contests_an_expert(own: str) -> None:
    scene, asked = Scene(own), list[PeerId]()
    scene.keep(pointer("a"), "x", "y")
    scene.lineages.hosted = lambda _: 0 if own == "a" else None
    scene.look(("a", 0), renewed="a")

    def seat(who: PeerId) -> str:
        asked.append(who)
        return who.text

    scene.lineages._seat = seat
    for _ in range(5):
        scene.look(("a", 0), renewed="a")
    assert not asked


def test_claims_of_a_crowd_are_not_all_remembered() -> None:
    scene, crowd = Scene(), [(f"crowd{i}", 5) for i in range(200)]
    scene.look(("a", 0), *crowd, renewed="a")
    scene.look(("a", 0), *crowd, renewed="a")
    known = scene.lineages._known[UID]
    assert known.stale is not None
    assert len(known.stale) <= 64


# --- generations -----------------------------------------------------------------------------------------------------

LAST = (1 << 53) - 1


def test_an_owner_that_jumps_to_the_last_generation_is_not_followed() -> None:
    scene, made = of_a()
    scene.keep(pointer("a", LAST, 41), "x", "y")
    for _ in range(3):
        assert scene.look(("a", 0), ("a", LAST), renewed="a")[:2] == ("a", 0)
    assert scene.kept == [made]
    assert scene.look(("a", 0), ("a", 1), renewed="a")[:2] == ("a", 1)


@pytest.mark.parametrize("own", ["a", "watcher"])
def test_an_heir_that_jumps_to_the_last_generation_is_not_followed(own: str) -> None:
    scene, _ = of_a(own=own)
    scene.lineages.hosted = lambda _: 0 if own == "a" else None
    scene.keep(pointer("s", LAST, 50, after=pointer("a", 0, 50, heir="s")))
    assert scene.look(("a", 0), ("s", LAST), renewed="as")[:2] == ("a", 0)


# --- heirs -----------------------------------------------------------------------------------------------------------


def test_beside_an_heir_that_took_the_next_generation_nobody_is_followed_that_took_a_later_one() -> None:
    scene, made = of_a()
    scene.keep(pointer("b", 1, 40, after=made))
    scene.keep(pointer("s", 3, 41, after=made))
    for _ in range(6):
        scene.look(("a", 0))
    assert scene.look(("a", 0), ("b", 1), ("s", 3), renewed="bs")[:2] == ("b", 1)


def test_a_stranger_that_claimed_early_is_passed_over_however_many_claims_of_other_experts_are_seen() -> None:
    scene, made = of_a()
    scene.keep(pointer("s", 1, 41, after=made))
    others = [SeenClaim(peer("z"), 0, 40, 1.0)]
    for _ in range(4):
        scene.look(("a", 0), ("s", 1), renewed="as")
        for number in range(600):
            scene.lineages.settle(scene.now, Uid(0, (3 + number // 256, number % 256)), others, [])
    for _ in range(20):
        assert scene.look(("s", 1), renewed="s")[:2] == ("a", 0)


def test_a_stranger_whose_early_claim_one_look_did_not_show_is_passed_over() -> None:
    scene, made = of_a()
    scene.keep(pointer("s", 1, 41, after=made))
    for shown in (True, True, False):
        scene.look(("a", 0), *[("s", 1)] * shown, renewed="as")
    for _ in range(20):
        assert scene.look(("s", 1), renewed="s")[:2] == ("a", 0)


@pytest.mark.parametrize("whole", [False, True])
def test_a_look_that_shows_no_checkpoints_makes_a_host_without_a_link_no_owner(whole: bool) -> None:
    """A look may time out for the checkpoints alone; one that does not is believed once it was so for a period."""
    scene, _ = of_a()
    for _ in range(5):
        scene.look(("a", 0))
    scene.copies, scene.whole = [], whole
    assert scene.look(("a", 0), ("s", 1), renewed="s")[:2] == ("a", 0)
    for _ in range(6):
        scene.look(("s", 1), renewed="s")
    assert scene.look(("s", 1), renewed="s")[:2] == (("s", 1) if whole else ("a", 0))


def test_a_newcomer_believes_no_claim_in_a_look_that_may_have_missed_the_checkpoints() -> None:
    scene = Scene(whole=False)
    claims = [SeenClaim(peer("s"), 0, 40, 1.0)]
    assert scene.lineages.settle(0.0, UID, claims, [], whole=False).claim is None
    scene.keep(pointer("a", 1), "x", "y")
    assert scene.look(("s", 0), ("a", 1), renewed="as")[:2] == ("a", 1)
