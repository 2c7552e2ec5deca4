"""The roll: nobody gets on it without the organizer's signature for this peer and run, whatever is shown and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.access.members import RunMembers
from peerd.core.errors import ProtocolViolation
from peerd.core.keys import Keypair
from tests.worlds.network.members import NOW, ORGANIZER, STRANGER, revoked, token

PEERS = [Keypair.from_seed(bytes([number]) * 32).peer_id for number in range(1, 5)]


def roll(stages: int = 2) -> RunMembers:
    return RunMembers("tiny", ORGANIZER.peer_id, stages)


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(["admit", "revoke", "forget"]), st.integers(0, 3), st.integers(0, 3))))
def test_only_holders_of_living_tokens_are_ever_on_the_roll(steps: list[tuple[str, int, int]]) -> None:
    books = roll()
    gone: set[int] = set()
    number = -1
    for at, (what, one, other) in enumerate(steps):
        now = NOW + 10 * at
        if what == "admit":
            data = token(PEERS[other], "stage", number=other, expires=NOW + 10 * other + 15)
            fine = one == other and other not in gone and now < NOW + 10 * other + 15
            assert (books.admit(PEERS[one], data, now) is None) == fine
        elif what == "revoke":
            newer = one * 4 + other > number
            assert books.learn_revoked(revoked(one * 4 + other, other)) == newer
            number, gone = (one * 4 + other, {other}) if newer else (number, gone)
        else:
            books.forget(PEERS[one])
        for index, peer in enumerate(PEERS):
            found = books.member(peer, now)
            assert found is None or (index not in gone and now < NOW + 10 * index + 15)
        assert books.member(ORGANIZER.peer_id, now) is not None


def test_another_token_takes_off_the_roll_who_was_on_it() -> None:
    books = roll()
    assert books.admit(PEERS[0], token(PEERS[0]), NOW) is None
    assert books.admit(PEERS[0], token(PEERS[1]), NOW)
    assert "no valid token for run tiny" in str(books.may_call(PEERS[0], "other/1", "other/1/ask", NOW))


def test_lists_are_taken_over_only_from_the_organizer_and_only_newer_ones() -> None:
    books = roll()
    assert not books.learn_revoked(b"")
    assert books.learn_revoked(revoked(0))
    for bad in (revoked(9, by=STRANGER), b"x" * 80, token(PEERS[0])):
        with pytest.raises(ProtocolViolation):
            books.learn_revoked(bad)
    assert not books.learn_revoked(revoked(0, 1))
    assert books.learn_revoked(revoked(1, 1))
    assert not books.learn_revoked(revoked(0))
    assert books.judge(PEERS[0], token(PEERS[0], number=1), NOW) == "the token shown was revoked by the organizer"


def test_methods_that_no_table_names_are_for_every_member_and_for_nobody_else() -> None:
    books = roll()
    books.admit(PEERS[0], token(PEERS[0], "backbone"), NOW)
    assert books.may_call(PEERS[0], "new/1", "new/1/thing", NOW) is None
    assert books.may_call(PEERS[1], "new/1", "new/1/thing", NOW) is not None
    assert books.may_call(PEERS[0], "stage/6", "stage/6/forward", NOW) is not None
    assert books.may_serve(PEERS[0], "kept/1", "kept/1/x", NOW) is None
    assert books.may_serve(PEERS[0], "state/1", "state/1/x", NOW) is not None
    assert books.may_serve(PEERS[0], "stage/6", "stage/6/x", NOW) is not None
    assert books.may_serve(PEERS[1], "dht/4", "dht/4/x", NOW) is None


def test_a_helper_is_no_stage() -> None:
    books = roll()
    books.admit(PEERS[0], token(PEERS[0], "aux"), NOW)
    for service, name, fine in (
        ("stage/6", "prepare", True),
        ("stage/6", "forward", False),
        ("average/2", "part", True),
    ):
        assert (books.may_serve(PEERS[0], service, f"{service}/{name}", NOW) is None) == fine
    for service, name, fine in (("swarm/6", "member", True), ("stage/6", "commit", False), ("average/2", "part", True)):
        assert (books.may_call(PEERS[0], service, f"{service}/{name}", NOW) is None) == fine


def test_microbatches_are_handed_over_by_trainers_and_stage_peers_and_relayed_for_stage_peers_alone() -> None:
    calls = {"trainer": (True, False), "stage": (True, True), "aux": (False, False), "backbone": (False, False)}
    serves = {"trainer": (False, True), "stage": (True, False), "aux": (False, False), "backbone": (False, False)}
    for role in calls:
        books = roll()
        books.admit(PEERS[0], token(PEERS[0], role), NOW)
        for may, fine in ((books.may_call, calls[role]), (books.may_serve, serves[role])):
            found = [may(PEERS[0], "handover/2", f"handover/2/{name}", NOW) is None for name in ("pass", "relay")]
            assert tuple(found) == fine, (role, may.__name__)
        assert books.may_call(PEERS[1], "handover/2", "handover/2/pass", NOW) is not None


@pytest.mark.parametrize(
    ("role", "reports", "reads", "serves"),
    [
        ("stage", True, True, True),
        ("trainer", True, True, False),
        ("aux", True, True, False),
        ("backbone", False, True, False),
    ],
)
def test_the_map_of_the_network_is_for_members_and_made_by_those_who_take_part(
    role: str, reports: bool, reads: bool, serves: bool
) -> None:
    books = roll()
    books.admit(PEERS[0], token(PEERS[0], role), NOW)
    assert (books.may_call(PEERS[0], "network/1", "network/1/report", NOW) is None) == reports
    assert (books.may_call(PEERS[0], "network/1", "network/1/map", NOW) is None) == reads
    assert (books.may_serve(PEERS[0], "network/1", "network/1/map", NOW) is None) == serves
    assert books.may_call(PEERS[1], "network/1", "network/1/map", NOW) is not None


def test_a_trainer_is_a_stage_only_where_there_is_no_pipeline() -> None:
    for stages, fine in ((1, True), (2, False)):
        books = roll(stages)
        books.admit(PEERS[0], token(PEERS[0], "trainer"), NOW)
        assert (books.may_call(PEERS[0], "swarm/6", "swarm/6/member", NOW) is None) == fine
        assert (books.may_serve(PEERS[0], "swarm/6", "swarm/6/x", NOW) is None) == fine
