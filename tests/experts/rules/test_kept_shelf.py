"""The shelf of a holder: bounds hold whatever comes, and the newest checkpoints stay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.experts.rules.kept_shelf import KeptShelf
from peerd.messages.experts import CheckpointRef, Name
from peerd.run.grid import Uid


def pointer(owner: int, uid: int = 0, generation: int = 0, version: int = 0, size: int = 10) -> CheckpointRef:
    signature = bytes([owner, uid, generation, version, size % 251]).ljust(64, b"s")
    name = Name.of(Uid(0, (uid,)))
    return CheckpointRef(b"r" * 16, name, generation, version, bytes(32), size, bytes([owner]) * 32, signature)


OWN = bytes([0]) * 32
POINTERS = st.builds(
    pointer,
    owner=st.integers(0, 4),
    uid=st.integers(0, 2),
    generation=st.integers(0, 2),
    version=st.integers(0, 3),
    size=st.integers(1, 60),
)


@given(st.lists(POINTERS, max_size=40))
def test_whatever_comes_the_bounds_hold_and_what_is_newest_of_an_owner_stays(coming: list[CheckpointRef]) -> None:
    shelf = KeptShelf(OWN, 100)
    for each in coming:
        before, room = shelf.pointers, shelf.room_bytes()
        if shelf.objection(each) is not None:
            assert shelf.pointers == before
            continue
        assert each.owner == OWN or each.size_bytes <= max(room, 50)
        gone = shelf.take(each)
        shelf.check()
        assert each in shelf.pointers
        later = {p.owner for p in shelf.pointers if p.expert == each.expert}
        for lost in gone:
            newer = any(p.owner == lost.owner and p.rank > lost.rank for p in before if p.expert == lost.expert)
            replaced = each.owner == lost.owner and each.expert == lost.expert
            assert newer or replaced or len(later) == 3


def test_an_older_checkpoint_is_not_taken() -> None:
    shelf = KeptShelf(OWN, 1000)
    shelf.take(pointer(1, version=2))
    assert "as new" in str(shelf.objection(pointer(1, version=1)))
    assert "as new" in str(shelf.objection(pointer(1, version=2, size=11)))
    assert shelf.objection(pointer(1, generation=1, version=0)) is None


def test_one_peer_has_no_more_than_half_but_for_ourselves() -> None:
    shelf = KeptShelf(OWN, 100)
    shelf.take(pointer(1, uid=0, size=40))
    assert "one peer" in str(shelf.objection(pointer(1, uid=1, size=11)))
    assert shelf.objection(pointer(2, uid=1, size=11)) is None
    assert shelf.objection(pointer(0, uid=1, size=60)) is None
    assert "no space" in str(shelf.objection(pointer(0, uid=1, size=61)))


def test_spares_make_room_and_the_newest_do_not() -> None:
    shelf = KeptShelf(OWN, 100)
    for version in (1, 2):
        shelf.take(pointer(1, version=version, size=25))
        shelf.take(pointer(2, uid=1, version=version, size=25))
    assert shelf.room_bytes() == 50
    gone = shelf.take(pointer(3, uid=2, size=50))
    assert [(p.owner[0], p.version) for p in gone] == [(1, 1), (2, 1)]
    assert "no space" in str(shelf.objection(pointer(4, uid=3, size=1)))


def test_a_generation_of_somebodys_own_making_takes_one_place_of_an_expert_and_not_all() -> None:
    shelf = KeptShelf(OWN, 1000)
    honest = pointer(1, version=3)
    shelf.take(honest)
    for version in range(3):
        shelf.take(pointer(2, generation=2, version=version))
    assert honest in shelf.pointers
    assert len(shelf) == 3
