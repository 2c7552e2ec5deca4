"""Two owners of one expert after a partition: exactly one gives way, also where each sees more networks on its side.

No stranger makes a host give way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from peerd.experts.owners.lineage import ExpertLineages
from peerd.experts.owners.owner_tree import ExpertReign, KeptCopy
from peerd.experts.rules.orphan_watch import SeenClaim
from peerd.messages.experts import CheckpointRef
from tests.experts.owners.test_lineage import UID, P, peer, pointer

LOOK_S = P / 4
HOLDERS = {"a": ("x", "y"), "b": ("z", "w")}


@dataclass
class Owner:
    """One host that owns the expert on its side of the partition, and what it knows."""

    name: str
    generation: int
    lineages: ExpertLineages
    gone: bool = False

    @classmethod
    def of(cls, name: str, generation: int, relayed: Sequence[str] = ()) -> Owner:
        """`relayed`: peers that this one sees over a relay."""
        hidden = {peer(each) for each in relayed}
        lineages = ExpertLineages(P, peer(name), lambda who: "over the relay" if who in hidden else who.text)
        made = cls(name, generation, lineages)
        lineages.hosted = lambda _: None if made.gone else made.generation
        return made


@dataclass
class Healed:
    """Two owners that see each other's claims and checkpoints from now on."""

    owners: list[Owner]
    copies: list[KeptCopy] = field(default_factory=list)
    now: float = 0.0

    def keep(self, made: CheckpointRef, *holders: str) -> CheckpointRef:
        self.copies.append(KeptCopy(made, [made.peer, *map(peer, holders)]))
        self.copies.sort(key=lambda copy: copy.pointer.rank, reverse=True)
        return made

    def look(self, periods: float, missed: int = 0) -> list[str]:
        """The owners that still host the expert after so many periods; each sees the other one in all looks but one of
        `missed`.
        """
        end, looks = self.now + periods * P, 0
        while self.now < end:
            self.now, looks = self.now + LOOK_S, looks + 1
            claims = [SeenClaim(peer(o.name), o.generation, 40, self.now) for o in self.owners if not o.gone]
            for owner in [owner for owner in self.owners if not owner.gone]:
                seen = [c for c in claims if c.peer == peer(owner.name) or not missed or looks % missed]
                found = owner.lineages.settle(self.now, UID, seen, self.copies)
                owner.gone = found.claim is not None and found.claim.peer != peer(owner.name)
        return [owner.name for owner in self.owners if not owner.gone]


def apart(generations: Mapping[str, int]) -> Healed:
    """Each owner sees its own holders, and the other one's over a relay: each finds itself ahead."""
    a = Owner.of("a", generations["a"], relayed=HOLDERS["b"])
    b = Owner.of("b", generations["b"], relayed=HOLDERS["a"])
    return Healed([a, b])


def heir_beside_its_former_owner(linked: bool) -> Healed:
    scene = apart({"a": 0, "b": 1})
    before = scene.keep(pointer("a", 0, 40))
    b = scene.owners[1].lineages
    b.settle(0.0, UID, [SeenClaim(peer("a"), 0, 40, 0.0)], [])
    b.took(0.0, UID, 1, before.as_former() if linked else None)
    scene.keep(pointer("a", 0, 60), *HOLDERS["a"])
    scene.keep(pointer("b", 1, 60, after=before if linked else None), *HOLDERS["b"])
    return scene


def two_heirs_of_one_owner(generation: int, linked: bool = True) -> Healed:
    scene = apart({"a": 1, "b": generation})
    before = pointer("c", 0, 40)
    for owner, links in zip(scene.owners, (True, linked), strict=True):
        owner.lineages.settle(0.0, UID, [SeenClaim(peer("c"), 0, 40, 0.0)], [])
        owner.lineages.took(0.0, UID, owner.generation, before.as_former() if links else None)
        made = pointer(owner.name, owner.generation, 60, after=before if links else None)
        scene.keep(made, *HOLDERS[owner.name])
    return scene


def both_anew(old: bool) -> Healed:
    scene = apart({"a": 0, "b": 0})
    for owner in scene.owners:
        made = scene.keep(pointer(owner.name, 0, 60), *HOLDERS[owner.name])
        if old and owner.name == "a":
            owner.lineages.found(made)
    return scene


@pytest.mark.parametrize(
    ("made", "stays", "within"),
    [
        (partial(heir_beside_its_former_owner, linked=True), "a", 5),
        (partial(heir_beside_its_former_owner, linked=False), "a", 5),
        (partial(two_heirs_of_one_owner, 2), "a", 5),
        (partial(two_heirs_of_one_owner, 1, linked=False), "a", 5),
        (partial(two_heirs_of_one_owner, 1), "", 5),
        (partial(both_anew, old=False), "", 5),
        (partial(both_anew, old=True), "a", 13),
    ],
    ids=["heir", "heir without a link", "later", "unlinked", "ids", "anew", "anew beside one with a history"],
)
def test_of_two_owners_after_a_partition_behind_home_routers_exactly_one_gives_way(
    made: Callable[[], Healed], stays: str, within: int
) -> None:
    scene = made()
    assert scene.look(1) == ["a", "b"], "neither sees more networks on the other side"
    left = scene.look(within - 1)
    assert left == [stays or max("ab", key=lambda name: peer(name))]
    assert scene.look(30) == left


def test_exactly_one_gives_way_though_looks_now_and_then_do_not_show_the_other_one() -> None:
    for made, stays in ((partial(two_heirs_of_one_owner, 2), "a"), (partial(both_anew, old=True), "a")):
        assert made().look(15, missed=4) == [stays]


def test_where_all_see_the_same_networks_the_side_with_more_wins_at_once() -> None:
    scene = Healed([Owner.of("a", 0), Owner.of("b", 1)])
    before = scene.keep(pointer("a", 0, 40))
    scene.owners[1].lineages.took(0.0, UID, 1, before.as_former())
    scene.keep(pointer("a", 0, 60), "x")
    scene.keep(pointer("b", 1, 60, after=before), *HOLDERS["b"])
    assert scene.look(1) == ["b"]


def test_an_owner_for_whom_nobody_vouches_gives_way_and_its_heir_does_not() -> None:
    scene = apart({"a": 0, "b": 1})
    before = scene.keep(pointer("a", 0, 40))
    scene.owners[1].lineages.took(0.0, UID, 1, before.as_former())
    scene.keep(pointer("b", 1, 60, after=before), *HOLDERS["b"])
    assert scene.look(20) == ["b"]


@pytest.mark.parametrize("generation", [0, 1, 2, 1001])
@pytest.mark.parametrize("linked", ["to nobody", "to the living host"])
def test_no_stranger_outlasts_a_host(generation: int, linked: str) -> None:
    """The stranger never gives way, and one of its peers, in another network, vouches for it."""
    host = Owner.of("b", 1)
    scene = Healed([host])
    before = scene.keep(pointer("a", 0, 40))
    host.lineages.took(0.0, UID, 1, before.as_former())
    mine = scene.keep(pointer("b", 1, 60, after=before), *HOLDERS["b"])
    scene.keep(pointer("s", generation, 90, after=mine if linked != "to nobody" else None), "crowd")
    for _ in range(400):
        scene.now += LOOK_S
        claims = [SeenClaim(peer("b"), 1, 60, scene.now), SeenClaim(peer("s"), generation, 90, scene.now)]
        found = host.lineages.settle(scene.now, UID, claims, scene.copies)
        assert found.claim == claims[0]
        assert host.lineages.owner(UID) == ExpertReign(1, peer("b"))


def test_an_owner_of_old_that_comes_again_late_does_not_outlast_the_present_one() -> None:
    scene = heir_beside_its_former_owner(linked=True)
    b = scene.owners[1]
    for number in range(1200):  # b alone, for 300 periods
        now = number * LOOK_S
        b.lineages.settle(now, UID, [SeenClaim(peer("b"), 1, 60, now)], scene.copies)
    scene.now = 300 * P
    assert scene.look(30) == ["a", "b"], "only the networks decide by now"
