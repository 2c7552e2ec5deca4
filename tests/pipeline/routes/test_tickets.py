"""The judge of tickets: what the trainer signed, brought by it or the stage before, and the latest attempt counts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.errors import Overloaded, Refused
from peerd.core.keys import Keypair
from peerd.core.limits import MICROBATCHES
from peerd.messages.handover import PassRequest, Ticket
from peerd.messages.proof import signed_ticket
from peerd.pipeline.routes.tickets import Tickets

STAGES = 3
TRAINER, OTHER, STRANGER, *PEERS = (Keypair.from_seed(f"{n}".encode().ljust(32, b".")) for n in range(3 + STAGES))
OWN, ROUTE = TRAINER.peer_id.text, [key.peer_id.text for key in PEERS]
RUN = b"r" * 16
BEFORE = {ROUTE[0]}  # of those who may hand on to stage 1


def body(stage: int = 1, trainer: str = OWN, by: Keypair = TRAINER, run: bytes = RUN, **changes: Any) -> PassRequest:
    bare = msgspec.structs.replace(Ticket(7, 5, 2, 0, 2, 0, ROUTE), **changes)
    return PassRequest(run, stage, trainer, signed_ticket(by.sign, run, by.peer_id.text, bare), None)


def judge(stage: int = 1) -> Tickets:
    return Tickets(RUN, ROUTE[stage], stage, STAGES)


def objection(shown: PassRequest, caller: str = ROUTE[0], tickets: Tickets | None = None, before: Any = None) -> str:
    found = (tickets or judge(shown.stage)).objection(caller, shown, BEFORE if before is None else before)
    assert found is None or isinstance(found, Refused | Overloaded)
    return "" if found is None else str(found)


def test_a_ticket_is_brought_by_its_trainer_or_by_a_peer_of_the_stage_before() -> None:
    assert objection(body()) == ""
    assert objection(body(0), OWN) == ""
    assert objection(body(), OWN) == ""  # as relay
    assert objection(body(), STRANGER.peer_id.text) == "you are not known to serve stage 0"
    assert objection(body(), ROUTE[2]) == "you are not known to serve stage 0"
    assert objection(body(0), ROUTE[1], before={ROUTE[1]}) == "only the trainer of a ticket may call its first peer"
    first_is_another = body(0, route=[STRANGER.peer_id.text, *ROUTE[1:]])
    assert objection(first_is_another, OWN) == "the ticket names another peer for this stage"


def test_a_mate_may_take_what_was_meant_for_another_of_its_stage() -> None:
    assert objection(body(route=[ROUTE[0], STRANGER.peer_id.text, ROUTE[2]])) == ""


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (body(by=OTHER), "not signed by its trainer"),
        (body(trainer=OTHER.peer_id.text), "not signed by its trainer"),
        (body(trainer="x"), "no peer id"),
        (body(trainer=OWN + " "), "no peer id"),
        (body(route=[ROUTE[0], "x", ROUTE[2]]), "no peer id"),
        (body(route=[ROUTE[0], ROUTE[1] + "\n", ROUTE[2]]), "no peer id"),
        (body(low=1, high=3, first=1, route=[*ROUTE]), "the ticket goes to stage 3; this run has 3 stages"),
        (body(low=1, high=2, first=1, route=ROUTE[1:]), "lacks a stage beside 1 to 2"),
        (body(low=0, high=0, route=ROUTE[:1]), "lacks a stage beside 0 to 0"),
        (body(low=2, high=2, first=2, route=ROUTE[2:]), "lacks a stage beside 2 to 2"),
        (body(2, low=0, high=0, route=ROUTE[:2]), "leads through stages 0 to 1, the call is for 2"),
        (body(0, low=2, high=2, first=1, route=ROUTE[1:]), "leads through stages 1 to 2, the call is for 0"),
        (body(low=2, high=2, first=1, route=ROUTE[1:]), "only the trainer of a ticket may call its first peer"),
    ],
)
def test_what_its_trainer_did_not_sign_for_this_stage_is_refused(shown: PassRequest, why: str) -> None:
    assert why in objection(shown)


def test_a_ticket_of_another_run_is_none_here() -> None:
    elsewhere = body(run=b"s" * 16)
    assert "not signed" in objection(msgspec.structs.replace(elsewhere, run=RUN))


@given(st.data())
def test_no_change_of_what_was_signed_gets_by(data: st.DataObject) -> None:
    shown = body().ticket
    field = data.draw(st.sampled_from(["step", "seq", "attempt"]))
    was = getattr(shown, field)
    changed = msgspec.structs.replace(shown, **{field: data.draw(st.integers(0, 1 << 15).filter(lambda n: n != was))})
    assert "not signed" in objection(msgspec.structs.replace(body(), ticket=changed))


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20))
def test_attempts_never_go_back_whatever_was_let_in_before_its_frames_came(calls: list[tuple[int, bool]]) -> None:
    """Calls are judged, and begin later or never: what began last is the latest that was."""
    tickets = judge()
    newest, waiting = -1, list[PassRequest]()
    for attempt, begins in calls:
        shown = body(attempt=attempt)
        refused = objection(shown, tickets=tickets)
        assert bool(refused) == (attempt < newest), refused
        if refused:
            continue
        waiting.append(shown)
        if begins:
            while waiting:
                one = waiting.pop()
                if one.ticket.attempt < newest:
                    with pytest.raises(Refused, match="a later attempt"):
                        tickets.begin(one)
                else:
                    tickets.begin(one)
                    newest = one.ticket.attempt


def test_one_trainers_attempts_say_nothing_of_anothers() -> None:
    tickets = judge()
    tickets.begin(body(attempt=9))
    assert "a later attempt" in objection(body(attempt=8), tickets=tickets)
    assert objection(body(attempt=0, trainer=OTHER.peer_id.text, by=OTHER), tickets=tickets) == ""
    assert objection(body(attempt=0, seq=6), tickets=tickets) == ""
    assert objection(body(attempt=0, step=8), tickets=tickets) == ""


def test_what_is_remembered_is_bounded_and_ends_with_its_step() -> None:
    tickets = judge()
    for seq in range(3 * MICROBATCHES):
        tickets.begin(PassRequest(RUN, 1, OWN, Ticket(7, seq, 1, 0, 2, 0, ROUTE), None))
    assert len(tickets._newest) == 2 * MICROBATCHES
    assert "a later attempt" in objection(body(attempt=0, seq=3 * MICROBATCHES - 1), tickets=tickets)
    tickets.arrive(8)
    assert not tickets._newest


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(1, 4), st.integers(0, 2))
def test_a_route_has_a_peer_on_both_sides_of_what_is_to_be_done(
    low: int, high: int, first: int, count: int, stage: int
) -> None:
    """So whoever is asked has somebody to hand on to, unless it serves the last stage, and gets its input."""
    try:
        shown = body(stage, low=low, high=high, first=first, route=(ROUTE * 2)[:count])
    except ValueError:
        return  # no ticket at all
    own = shown.ticket.peer_of(stage) or ""
    judge = Tickets(RUN, own, stage, STAGES)
    if judge.objection(OWN, shown, BEFORE) is None:
        assert shown.ticket.is_done_at(stage) or stage in (low - 1, high + 1)
        assert stage == STAGES - 1 or shown.ticket.peer_of(stage + 1) is not None or stage > high
        assert stage == 0 or stage == first == low - 1 or stage > first
