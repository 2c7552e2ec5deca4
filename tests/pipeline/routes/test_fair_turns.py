"""Turns at a stage: who floods waits behind its own calls, however many identities it has; evaluations go last."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.pipeline.routes.fair_turns import FairTurns, Turn
from peerd.wire.budget.book import User


def at(region: str, place: str, peer: str) -> User:
    return User(peer, place, region)


HONEST = at("b", "b1", "honest")


def went(turns: FairTurns, calls: dict[int, Turn], count: int = 10_000) -> list[Turn]:
    """The next calls that go, where no evaluation is ever under way."""
    found: list[Turn] = []
    while len(found) < count and (ticket := turns.pop(may_evaluate=True)) is not None:
        found.append(calls.pop(ticket))
    return found


def asking(*waiting: Turn) -> tuple[FairTurns, dict[int, Turn]]:
    turns = FairTurns()
    return turns, {turns.ask(turn): turn for turn in waiting}


def test_eight_identities_of_one_network_have_what_one_trainer_elsewhere_has() -> None:
    flood = [Turn(at("a", f"a{i % 4}", f"liar{i % 8}")) for i in range(512)]
    turns, calls = asking(*flood, *[Turn(HONEST)] * 50)
    assert sum(turn.user == HONEST for turn in went(turns, calls, 100)) == 50


def test_peers_of_one_network_share_by_address_and_then_by_peer() -> None:
    users = [*[at("a", "a1", f"x{i}") for i in range(3)], at("a", "a2", "y")]
    turns, calls = asking(*[Turn(user) for user in users for _ in range(60)])
    first = went(turns, calls, 60)
    assert sum(turn.user.place == "a2" for turn in first) == 30
    assert [sum(turn.user.peer == f"x{i}" for turn in first) for i in range(3)] == [10, 10, 10]


def test_who_calls_now_and_then_does_not_wait_for_a_flood() -> None:
    turns, calls = asking(*[Turn(at("a", "a1", "liar")) for _ in range(200)])
    went(turns, calls, 50)
    for _ in range(5):
        calls[turns.ask(Turn(HONEST))] = Turn(HONEST)
        assert HONEST in [turn.user for turn in went(turns, calls, 2)]
        went(turns, calls, 10)


def test_the_oldest_step_goes_first_and_of_one_peer_backwards() -> None:
    one, other = at("a", "a", "a"), at("b", "b", "b")
    turns, calls = asking(Turn(one, 8), Turn(one, 7), Turn(other, 8, backward=True), Turn(one, 7, backward=True))
    assert [(turn.step, turn.backward) for turn in went(turns, calls)] == [(7, True), (7, False), (8, True), (8, False)]


def test_an_evaluation_goes_last_and_yet_goes() -> None:
    turns, calls = asking(*[Turn(HONEST, evaluates=True)] * 3, *[Turn(HONEST, 5) for _ in range(40)])
    order = [turn.evaluates for turn in went(turns, calls)]
    assert [at for at, evaluates in enumerate(order) if evaluates] == [8, 17, 26]
    turns, calls = asking(Turn(HONEST, evaluates=True))
    assert turns.pop(may_evaluate=False) is None
    assert turns.pop(may_evaluate=True) is not None
    assert len(turns) == 0


@pytest.mark.slow
@given(st.integers(0, 1 << 30))
def test_any_calls_go_once_each_and_nothing_is_remembered(seed: int) -> None:
    rng = random.Random(seed)
    turns, waiting = FairTurns(), dict[int, Turn]()
    for _ in range(rng.choice([10, 300])):
        if rng.random() < 0.6:
            region, place = rng.choice("abc"), rng.choice("xyz")
            user = at(region, region + place, f"{region}{place}{rng.randrange(30)}")
            turn = Turn(user, rng.randrange(2), rng.random() < 0.5, rng.random() < 0.1, rng.choice([1.0, 2.0]))
            waiting[turns.ask(turn)] = turn
        elif waiting and rng.random() < 0.3:
            ticket = rng.choice(list(waiting))
            del waiting[ticket]
            turns.give_back(ticket)
        elif (popped := turns.pop(may_evaluate=rng.random() < 0.5)) is not None:
            gone = waiting.pop(popped)
            others = [turn.step for turn in waiting.values() if not turn.evaluates]
            assert gone.evaluates or not others or gone.step <= min(others)
        assert len(turns) == len(waiting)
        assert len(turns._stamps) <= 64 + 6 * len(waiting) + 3
    while (popped := turns.pop(may_evaluate=True)) is not None:
        del waiting[popped]
    assert waiting == turns._stamps == turns._progress == {}
