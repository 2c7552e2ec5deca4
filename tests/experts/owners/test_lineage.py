"""Lineage of experts: owners follow each other by links and voices alone, whatever strangers claim and sign."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from peerd.core.ids import PeerId
from peerd.experts.owners.lineage import AdopterTurns, ExpertLineages
from peerd.experts.owners.owner_tree import ExpertReign, KeptCopy
from peerd.experts.rules.orphan_watch import SeenClaim
from peerd.messages.experts import CheckpointRef, Name
from peerd.run.grid import Uid
from tests.worlds.network.hosts import keypair

UID = Uid(0, (1, 2))
P = 10.0
OWN = "watcher"


def peer(name: str) -> PeerId:
    return keypair(name).peer_id


def pointer(
    owner: str, generation: int = 0, version: int = 40, after: CheckpointRef | None = None, heir: str = ""
) -> CheckpointRef:
    facts: dict[str, Any] = {"began": after.version, "former": after.as_former()} if after is not None else {}
    made = CheckpointRef(
        bytes(16),
        Name.of(UID),
        generation,
        version,
        bytes(32),
        1000,
        peer(owner).public_key,
        heir=peer(heir).public_key if heir else b"",
        **facts,
    )
    return made.signed(keypair(owner))


@dataclasses.dataclass
class Scene:
    """What one watcher sees; each peer is in a network of its own, but for those of `places`."""

    own: str = OWN
    places: dict[str, str] = dataclasses.field(default_factory=dict)
    copies: list[KeptCopy] = dataclasses.field(default_factory=list)
    now: float = 0.0
    whole: bool = True  # a look shows all checkpoints

    def __post_init__(self) -> None:
        names = {peer(name): place for name, place in self.places.items()}
        self.until = dict[tuple[str, int], float]()
        self.lineages = ExpertLineages(P, peer(self.own), lambda who: names.get(who, who.text))

    def keep(self, made: CheckpointRef, *holders: str) -> CheckpointRef:
        """Have these peers hold a checkpoint, besides its owner."""
        self.copies.append(KeptCopy(made, [made.peer, *map(peer, holders)]))
        self.copies.sort(key=lambda copy: copy.pointer.rank, reverse=True)
        return made

    def look(
        self, *claims: tuple[str, int], renewed: Sequence[str] = (), after_s: float = 2.5
    ) -> tuple[str, int, bool]:
        """The owner and its generation, as one look shows them, and whether another one is waited for."""
        self.now += after_s
        self.until |= {claim: self.now for claim in claims if claim[0] in renewed}
        seen = [SeenClaim(peer(name), number, 40, self.until.get((name, number), 0.0)) for name, number in claims]
        found = self.lineages.settle(self.now, UID, seen, self.copies, whole=self.whole)
        reign = self.lineages.owner(UID)
        assert reign is not None
        self.kept = [copy.pointer for copy in found.kept]
        names = {peer(name): name for name in ("a", "b", "c", "s", OWN)}
        return names[reign.owner], reign.generation, found.waits


def of_a(**facts: Any) -> tuple[Scene, CheckpointRef]:
    """A scene in which `a` hosts the expert, and two others hold its checkpoint."""
    scene = Scene(**facts)
    made = scene.keep(pointer("a"), "x", "y")
    assert scene.look(("a", 0), renewed="a") == ("a", 0, False)
    return scene, made


def test_a_stranger_is_no_owner_whatever_it_claims_while_the_owner_lives() -> None:
    scene, made = of_a()
    scene.keep(pointer("s", 1001, 1_000_000))
    scene.keep(pointer("s", 1, 41, after=made))
    for _ in range(20):
        assert scene.look(("a", 0), ("s", 1001), ("s", 1), renewed="as")[:2] == ("a", 0)
        assert scene.kept == [made]


def test_when_the_owner_is_gone_no_strangers_checkpoint_counts_that_has_no_link() -> None:
    scene, made = of_a()
    scene.keep(pointer("s", 1001, 1_000_000))
    for _ in range(20):
        assert scene.look(("s", 1001), renewed="s") == ("a", 0, False)
        assert scene.kept == [made]


def test_a_stranger_that_claimed_before_the_owner_was_gone_is_passed_over() -> None:
    scene, made = of_a()
    scene.keep(pointer("s", 1, 41, after=made))
    for _ in range(3):
        scene.look(("a", 0), ("s", 1), renewed="as")
    for _ in range(20):
        assert scene.look(("s", 1), renewed="s") == ("a", 0, False)


def test_an_heir_owns_what_it_goes_on_with_once_its_checkpoint_shows_that() -> None:
    scene, made = of_a()
    scene.look(("a", 0), after_s=12)
    assert scene.look(("a", 0), ("b", 1), renewed="b") == ("a", 0, True)  # others wait for it
    later = scene.keep(pointer("b", 1, 40, after=made))
    assert scene.look(("a", 0), ("b", 1), renewed="b") == ("b", 1, False)
    assert scene.kept == [later, made]
    assert scene.look(("a", 0), ("b", 1), renewed="b") == ("b", 1, False)  # the old claim only stands there still


def test_an_owner_that_hands_an_expert_over_is_followed_at_once() -> None:
    scene, _ = of_a()
    scene.keep(pointer("b", 1, 50, after=pointer("a", 0, 50, heir="b")))
    assert scene.look(("a", 0), ("b", 1), renewed="ab") == ("b", 1, False)


def test_who_handed_an_expert_over_follows_its_heir_before_a_checkpoint_shows_it() -> None:
    scene = Scene("a")
    scene.keep(pointer("a"), "x", "y")
    scene.lineages.hosted = lambda _: 0
    scene.look(("a", 0), renewed="a")
    scene.lineages.hosted = lambda _: None
    scene.lineages.gave(scene.now, UID, 1, peer("b"))
    for _ in range(20):
        assert scene.look(("b", 1), renewed="b") == ("b", 1, False)


def test_a_hand_over_to_another_peer_is_none_to_a_stranger() -> None:
    scene, _ = of_a()
    scene.keep(pointer("s", 1, 50, after=pointer("a", 0, 50, heir="b")))
    assert scene.look(("a", 0), ("s", 1), renewed="as") == ("a", 0, False)


def test_where_nothing_was_kept_the_next_generation_needs_no_link() -> None:
    scene = Scene()
    assert scene.look(("a", 0), renewed="a") == ("a", 0, False)
    scene.look(after_s=2 * P)
    assert scene.look(("s", 1001), renewed="s") == ("a", 0, False)
    assert scene.look(("b", 1), ("s", 1001), renewed="bs") == ("b", 1, False)


@pytest.mark.parametrize("place", ["one", ""])
def test_a_newcomer_believes_networks_and_not_identities(place: str) -> None:
    crowd = [f"crowd{i}" for i in range(9)]
    scene = Scene(places=dict.fromkeys(["s", *crowd], place) if place else {})
    scene.keep(pointer("a"), "x", "y")
    scene.keep(pointer("s", 1001, 1_000_000), *crowd)
    assert scene.look()[0] == ("a" if place else "s")  # who has more networks than hold copies is believed


def test_after_a_partition_both_owners_see_the_same_one_win() -> None:
    for holders, winner in (((), "a"), (("x",), "b"), (("x", "z"), "b")):
        made = pointer("a")
        for own, generation in (("a", 0), ("b", 1)):
            scene = Scene(own)
            scene.lineages.hosted = lambda _, it=generation: it  # type: ignore[misc]
            scene.keep(made, "x", "y")
            scene.keep(pointer("b", 1, 45, after=made), *holders)
            scene.look(("a", 0), ("b", 1))
            assert scene.look(("a", 0), ("b", 1), renewed="ab")[0] == winner, (own, holders)


def test_a_host_that_took_an_expert_does_not_yield_to_the_claim_that_its_lost_host_left() -> None:
    scene, made = of_a(own=OWN)
    scene.look(("a", 0), after_s=12)
    scene.lineages.took(scene.now, UID, 1, made.as_former())
    scene.lineages.hosted = lambda _: 1
    assert scene.look(("a", 0))[:2] == (OWN, 1)
    assert scene.look(("a", 0), (OWN, 1), renewed=[OWN])[:2] == (OWN, 1)


def test_all_peers_of_one_network_share_one_turn_and_there_are_few_turns() -> None:
    turns = AdopterTurns(P)
    longest_s = turns.longest_s(1000)
    assert turns.has_turn(0, UID, peer("s"), "net", 1000)
    assert not turns.has_turn(longest_s, UID, peer("s2"), "net", 1000)
    assert not turns.has_turn(longest_s, UID, peer("s"), "net", 1000)
    assert [turns.has_turn(longest_s, UID, peer("b"), f"net{i}", 1000) for i in range(4)] == [True, True, False, False]
    turns.settled(UID)
    assert turns.has_turn(longest_s, UID, peer("s"), "net", 1000)


def test_a_reign_is_ordered_by_generation_first() -> None:
    assert ExpertReign(2, peer("a")) > ExpertReign(1, peer("b"))


def test_an_owner_is_gone_once_it_renewed_its_claim_for_longer_than_a_period_no_more() -> None:
    scene = Scene()
    scene.keep(pointer("a"))
    claims = [SeenClaim(peer("a"), 0, 40, 0.0)]
    assert scene.lineages.gone(0.0, UID, claims) is None  # no owner is known yet
    scene.look(("a", 0), renewed="a")
    claims = [SeenClaim(peer("a"), 0, 40, scene.now)]
    assert scene.lineages.gone(scene.now + P, UID, claims) is None
    assert scene.lineages.gone(scene.now + 1.2 * P, UID, claims) == peer("a")
