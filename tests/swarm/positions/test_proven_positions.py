"""What proves a position, and what does not: sight, members' words and signatures, keepers, trusted peers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from peerd.core.keys import Keypair
from peerd.messages.commits import CommitProof, Committed, ProofShown
from peerd.messages.proof import commit_signature, has_committed
from peerd.messages.swarm import Moved, Position
from peerd.rpc.rpc import Answer
from peerd.swarm.conductor.commit_proofs import CommitProofs
from peerd.swarm.positions.evidence import Evidence
from peerd.swarm.positions.proven_positions import EstablishedMembers, ProvenPositions
from peerd.swarm.roster import START, Roster
from tests.worlds.machines.conducting import hello

RUN = b"r" * 16
OLD, NOW, MADE_UP = Position(4, b"old"), Position(6, b"now"), Position(5, b"made up")
KNOWN = {"own/0": 0, "a/0": 0, "b/1": 1, "c/1": 1}
KEYS = [Keypair.from_seed(bytes([n]) * 32) for n in range(4)]
NETWORKS = {"near": "n1", "far": "n2", "mate": "n1"}.__getitem__


def proven(known: dict[str, int] | None = None, **more: Any) -> ProvenPositions:
    return ProvenPositions("own/0", EstablishedMembers("own/0", KNOWN if known is None else known), **more)


def members(**saw: Position) -> Roster:
    """Members of stage 1 that hold these positions."""
    roster = Roster(2)
    for peer, position in saw.items():
        roster.enter(hello(f"{peer}/1", START, stage=1, saved=(position,)))
    return roster


def test_what_the_own_peer_saw_needs_no_living_witness() -> None:
    """All others may be dead: checkpoints that were once good stay good."""
    assert proven(seen=[NOW]).proves(NOW, members(newcomer=NOW))
    assert not proven().proves(NOW, members(newcomer=NOW))
    own = Roster(2)
    own.enter(hello("own/0", START, saved=(NOW,)))
    assert proven().proves(NOW, own)


def test_more_than_a_third_of_the_known_members_bear_a_position_out() -> None:
    assert not proven().proves(MADE_UP, members(a=MADE_UP, x=MADE_UP, y=MADE_UP, z=MADE_UP))
    assert proven().proves(NOW, members(a=NOW, b=NOW))
    assert not proven({"own/0": 0, "a/0": 0}).proves(NOW, members(a=NOW)), "one alone is no more than the own peer"


def test_whoever_knows_nothing_believes_no_number_of_strangers() -> None:
    nothing = proven({})
    crowd = members(x=MADE_UP, y=MADE_UP, z=MADE_UP)
    assert nothing.knows_nothing(crowd.entries)
    assert not nothing.proves(MADE_UP, crowd)
    assert nothing.proves(START, crowd)
    assert proven({}, trusted=["z"]).proves(MADE_UP, crowd), "the user chose to"


def test_keepers_are_believed_in_two_networks_by_who_knows_nobody_else_or_if_they_are_trusted() -> None:
    for kept, known, trusted, counts in [
        ({"near": [NOW]}, {}, [], False),
        ({"near": [NOW], "mate": [NOW]}, {}, [], False),
        ({"near": [NOW], "far": [NOW]}, {}, [], True),
        ({"near": [NOW], "far": [NOW]}, KNOWN, [], False),
        ({"near": [NOW], "far": [NOW], "mate": [OLD]}, {}, ["mate"], False),
        ({"near": [NOW]}, KNOWN, ["near"], True),
    ]:
        made = proven(known, trusted=trusted)
        made.keepers(kept, NETWORKS)
        assert made.proves(NOW, Roster(2)) is counts, (kept, known, trusted)


def test_a_member_that_is_long_gone_has_no_say_for_ever() -> None:
    made = EstablishedMembers("own/0", KNOWN)
    made.step_made(1000)
    for step in (1100, 1300):
        made.add("own/0", 0, step)
        made.step_made(step)
    assert made.peers == {"own"}
    assert not made.knows_of(1)


@pytest.mark.parametrize(
    ("claims", "there", "vouched"),
    [
        ({"b/1"}, {"b/1", "c/1"}, True),
        ({"x/1"}, {"b/1", "c/1", "x/1"}, False),
        ({"x/1"}, {"x/1"}, False),  # b and c may come back
        ({"x/1"}, {"x/1", "b/0", "c/0"}, True),  # they serve another stage now
    ],
)
def test_newcomers_do_not_vouch_for_a_state_that_members_of_the_stage_had(
    claims: set[str], there: set[str], vouched: bool
) -> None:
    assert EstablishedMembers("own/0", KNOWN).vouch(1, claims, there) is vouched


def signed(key: Keypair, position: Position = NOW, by: Keypair | None = None) -> Committed:
    signature = commit_signature((by or key).sign, RUN, 1, position, b"d" * 32)
    return Committed(key.peer_id.text, 1, b"d" * 32, signature)


def test_a_signature_proves_one_members_commit_to_one_position_of_one_run() -> None:
    one = signed(KEYS[0])
    assert has_committed(RUN, NOW, one)
    assert not has_committed(b"o" * 16, NOW, one)
    assert not has_committed(RUN, OLD, one)
    assert not has_committed(RUN, NOW, signed(KEYS[0], by=KEYS[1]))
    assert not has_committed(RUN, NOW, Committed("nobody", 1, b"d" * 32, one.signature))


def proofs_of(shown: list[Committed]) -> CommitProofs:
    """Of a peer that knows three members, and is shown these signatures."""

    async def call(*_: object, **__: object) -> Answer[ProofShown]:
        return Answer(ProofShown(CommitProof(NOW, shown)))

    following = SimpleNamespace(established={f"{key.peer_id.text}/1": 1 for key in KEYS[:3]})
    rpc = SimpleNamespace(call=call)
    return CommitProofs(RUN, cast(Any, rpc), cast(Any, None), cast(Any, following), ())


@pytest.mark.parametrize(
    ("shown", "counts"),
    [
        ([signed(KEYS[0]), signed(KEYS[1])], True),
        ([signed(KEYS[0])], False),  # a third is not more than a third
        ([signed(KEYS[0])] * 3, False),
        ([signed(KEYS[0]), signed(KEYS[1], by=KEYS[3])], False),
        ([signed(KEYS[0]), signed(KEYS[3])], False),  # a stranger
        ([signed(KEYS[0], OLD), signed(KEYS[1], OLD)], False),
    ],
)
async def test_a_proof_counts_with_signatures_of_more_than_a_third_of_the_known_members(
    shown: list[Committed], counts: bool
) -> None:
    mine = proofs_of(shown)
    assert await mine.learn(KEYS[3].peer_id, NOW) is counts
    assert mine.counts(NOW, []) is counts
    assert mine.evidence.has_proof(NOW) is counts


def test_evidence_comes_back_from_disk_as_it_was() -> None:
    mine, again = Evidence(), Evidence()
    mine.told(OLD, {"a/0": 0})
    mine.stepped(NOW, KNOWN)
    mine.told(MADE_UP, {"liar/0": 0})
    mine.take(CommitProof(NOW, [signed(KEYS[0])]))
    again.load(mine.to_bytes())
    again.told(MADE_UP, {"liar/0": 0})
    assert (again.seen, again.established) == (mine.seen, mine.established) == ([OLD, NOW], KNOWN)
    assert again.proof(NOW) == mine.proof(NOW)
    assert again.signers(NOW) == {KEYS[0].peer_id.text}
    for damaged in (b"", b"{}", b'{"format":2,"seen":[],"established":{},"proofs":[]}', mine.to_bytes()[:-9]):
        with pytest.raises(ValueError, match=r"."):
            Evidence().load(damaged)


def test_a_conductor_collects_the_signatures_of_its_last_commits() -> None:
    mine = Evidence()
    for number in range(100):
        target = Position(number, b"run")
        mine.collect("a/0", target, Moved(target, b"d", b"s"))
        mine.collect("b/0", target, Moved(OLD, b"d", b"s"))
    found = mine.proof(Position(99, b"run"))
    assert found is not None
    assert [one.peer for one in found.committed] == ["a"]
    assert mine.proof(Position(1, b"run")) is None
