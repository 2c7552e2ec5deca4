"""The ledger of a batch: what each holder has, and what is left to do, after whatever trainers and members say."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from peerd.messages.swarm import Mb
from peerd.swarm.batch.batch_ledger import NOBODY, BatchLedger

STAGES, HOLDERS, TRAINERS = 2, ("x", "y", "z"), ("a", "b")


@given(st.randoms(use_true_random=False))
def test_what_it_keeps_count_of_follows_from_its_entries(rng: random.Random) -> None:
    ledger = BatchLedger(STAGES, 8)
    for now in range(60):
        mb, stage, holder = Mb(rng.choice(TRAINERS), rng.randrange(6)), rng.randrange(STAGES), rng.choice(HOLDERS)
        held = frozenset(other for other in ledger.entries if rng.random() < 0.5)
        if mb not in ledger.entries:
            ledger.admit(mb, float(now))
            continue
        match rng.randrange(9):
            case 0:
                ledger.finish(mb)
            case 1 | 2:
                ledger.hold(mb, stage, holder)
            case 3:
                ledger.unhold(mb, stage, float(now))
            case 4:
                ledger.keep_only(holder, stage, held, float(now))
                assert ledger.held[stage].get(holder, {}).keys() - ledger.summed[stage] <= held
            case 5:
                ledger.lose(holder, float(now))
            case 6:
                ledger.sum_up(stage, (mb for mb in held if not ledger.lacks(mb, stage)))
            case 7:
                ledger.release(stage, held, float(now))
            case _:
                ledger.drop(mb)
        ledger.check()
        assert ledger.is_missing(mb, [False, False]) == (ledger.lacks(mb, 0) or ledger.lacks(mb, 1))
        todo = {name: [ledger.entries[one] for one in ledger.open_of(name)] for name in ledger.open}
        since = {name: [entry.since for entry in of_one if entry.lacking] for name, of_one in todo.items()}
        assert ledger.begun() == {name: (len(found), found[0]) for name, found in since.items() if found}


def test_each_member_is_assigned_what_it_holds() -> None:
    ledger = BatchLedger(1, 3)
    for seq, holder in ((1, "x"), (2, "y"), (3, "x")):
        ledger.admit(Mb("a", seq), 0.0)
        ledger.hold(Mb("a", seq), 0, holder)
    ledger.hold(Mb("a", 1), 0, "y")  # a later report
    assert ledger.assigned(0, ["x", "y", "z"]) == {"x": (Mb("a", 3),), "y": (Mb("a", 2), Mb("a", 1)), "z": ()}
    assert ledger.credit() == {"x": 1, "y": 2}


def test_a_holder_that_lost_what_is_in_a_sum_holds_it_no_more_once_the_sum_is_given_up() -> None:
    ledger, mbs = BatchLedger(1, 3), [Mb("a", seq) for seq in range(3)]
    for mb in mbs:
        ledger.admit(mb, 0.0)
        ledger.hold(mb, 0, "x")
    ledger.sum_up(0, mbs)
    ledger.keep_only("x", 0, frozenset(mbs[:1]), 1.0)
    ledger.check()
    assert not ledger.missing[0]
    ledger.keep_only("x", 0, frozenset(mbs[:2]), 2.0)  # it has heard of the second one again
    ledger.release(0, mbs, 3.0)
    ledger.check()
    assert ledger.unsummed(0, "x") == tuple(mbs[:2])
    assert ledger.lacks(mbs[2], 0)


def test_a_batch_that_is_over_is_let_go_of_in_pieces() -> None:
    ledger = BatchLedger(1, 10)
    for seq in range(10):
        ledger.admit(Mb("a", seq), 0.0)
        ledger.hold(Mb("a", seq), 0, f"holder {seq}")
    left = []
    while ledger.shed(4):
        left.append(len(ledger.entries))
    assert left == [6, 2]
    assert (ledger.entries, ledger.held) == ({}, [{}])


def test_trainers_are_found_by_their_oldest_open_microbatch() -> None:
    ledger = BatchLedger(1, 4)
    for now, name in ((1.0, "a"), (2.0, "b"), (3.0, "a")):
        ledger.admit(Mb(name, int(now)), now)
    assert (ledger.waiting_since(1.0), ledger.waiting_since(2.0)) == (["a"], ["a", "b"])
    assert ledger.entries[Mb("a", 1)].holders == [NOBODY]
