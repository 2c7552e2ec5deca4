"""The choice of a stage: newcomers are dealt to gaps, and one peer at a time moves to a stage that has none."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.messages.swarm import MemberInfo
from peerd.swarm.stage_choice import EMPTY_S, MOVE_AGAIN_S, TURN_S, Arrival, Move, Need, Seat, VacancyWatch, place

ALONE = [Arrival(0.0, "me")]


def seats(*counts: int) -> list[Seat]:
    return [Seat(f"{stage}{number}", stage) for stage, count in enumerate(counts) for number in range(count)]


def need(*counts: int, held: Iterable[int] = ()) -> Need:
    return Need(len(counts), seats(*counts), frozenset(held))


# --- joining ----------------------------------------------------------------------------------------------------------
def test_a_newcomer_takes_the_stage_that_has_no_peer() -> None:
    assert place(need(2, 0, 1), ALONE, "me") == (1, "it has no peer")
    assert place(need(2, 1), ALONE, "me") == (1, "it has 1 peer, and no stage has fewer")


def test_its_own_checkpoint_does_not_lead_it_past_an_empty_stage() -> None:
    mine = [Arrival(0.0, "me", has=(0,))]
    assert place(need(1, 0, held=[0]), mine, "me") == (1, "it has no peer")


def test_its_own_checkpoint_decides_between_equally_needy_stages() -> None:
    mine = [Arrival(0.0, "me", has=(2, 1))]
    assert place(need(1, 1, 1, held=[0, 1, 2]), mine, "me") == (2, "this peer has a checkpoint of it")
    assert place(need(1, 1, 2, held=[0, 1, 2]), mine, "me") == (1, "this peer has a checkpoint of it")


def test_a_state_that_nobody_else_has_comes_first() -> None:
    mine = [Arrival(0.0, "me", has=(0,))]
    assert place(need(1, 0), mine, "me") == (0, "no other peer has its state")


def test_of_peers_that_start_together_those_with_a_checkpoint_go_where_it_is_needed() -> None:
    comers = [Arrival(0.0, "none"), Arrival(1.0, "zero", has=(0,)), Arrival(2.0, "one", has=(1,))]
    chosen = {one.peer: place(need(0, 0), comers, one.peer)[0] for one in comers}
    assert chosen == {"none": 0, "zero": 0, "one": 1}


def test_its_own_dead_post_does_not_count() -> None:
    listed = Need(2, [Seat("other", 0), Seat("me", 1)], frozenset({0}))
    assert place(listed, ALONE, "me")[0] == 1


def test_a_gap_that_another_is_on_its_way_to_is_filled() -> None:
    comers = [*ALONE, Arrival(5.0, "mover", takes=1)]
    assert place(need(2, 0), comers, "me")[0] == 1, "that stage has the fewest all the same"
    assert place(need(1, 0, 0), comers, "me")[0] == 2
    assert not Arrival(0.0, "mover", takes=1).counts(31.0)
    assert not Arrival(0.0, "comer").counts(16.0)


@given(counts=st.lists(st.integers(0, 3), min_size=1, max_size=5), comers=st.integers(1, 8), seed=st.integers(0, 99))
def test_peers_that_join_at_once_leave_no_stage_empty_that_they_could_fill(
    counts: list[int], comers: int, seed: int
) -> None:
    rng = random.Random(seed)
    has = [tuple(rng.sample(range(len(counts)), rng.randint(0, len(counts)))) for _ in range(comers)]
    arrivals = [Arrival(float(i), f"c{i}", has[i]) for i in range(comers)]
    there = need(*counts, held=range(len(counts)))
    chosen = Counter(place(there, rng.sample(arrivals, comers), one.peer)[0] for one in arrivals)
    after = [count + chosen[stage] for stage, count in enumerate(counts)]
    assert max(after[stage] for stage in chosen) - min(after) <= 1, "one went to a stage that needed it less"


# --- moving -----------------------------------------------------------------------------------------------------------
def member(peer: str, stage: int, since: float = 1.0, ready: bool = True) -> MemberInfo:
    return MemberInfo(peer, stage, [], ready, since=since)


OLD, NEW = member("old", 0, since=1.0), member("new", 0, since=2.0)


def first_move(own: str, members: list[MemberInfo], stages: int = 2, until: float = 60.0) -> tuple[float, Move] | None:
    """The first second at which it moves, with the move."""
    watch = VacancyWatch(own, stages)
    for now in itertools.count():
        if now > until:
            return None
        if (move := watch.look(float(now), members)) is not None:
            return float(now), move
    return None


def test_the_latest_of_the_best_staffed_stage_moves_first_and_the_next_only_when_it_does_not() -> None:
    found = first_move("new", [OLD, NEW])
    assert found is not None
    at, move = found
    assert (at, move.source, move.target, move.mates, move.ready) == (EMPTY_S, 0, 1, ("old",), {"old"})
    late = first_move("old", [OLD, NEW])
    assert late is not None
    assert late[0] == EMPTY_S + TURN_S


def test_it_stays_where_the_stage_has_peers_or_fills_in_time() -> None:
    assert first_move("new", [OLD, NEW, member("one", 1)]) is None
    watch = VacancyWatch("new", 2)
    assert watch.look(0.0, [OLD, NEW]) is None
    assert watch.look(4.0, [OLD, NEW, member("one", 1)]) is None
    assert watch.look(6.0, [OLD, NEW]) is None, "it is empty anew, from now on"
    assert watch.look(6.0 + EMPTY_S, [OLD, NEW]) is not None


def test_the_only_peer_of_a_stage_never_leaves_it() -> None:
    assert first_move("old", [OLD]) is None
    assert first_move("one", [OLD, NEW, member("one", 1)], stages=3) is None


def test_of_a_stage_those_without_the_current_state_move_first() -> None:
    lagging = member("lagging", 0, since=0.5, ready=False)
    found = first_move("lagging", [OLD, NEW, lagging])
    assert found is not None
    assert found[0] == EMPTY_S


def test_a_helper_is_no_peer_of_a_stage_and_a_peer_of_two_posts_stays() -> None:
    helper = member("helper", 1, since=0.0)
    assert first_move("new", [OLD, NEW, helper]) is not None
    both = [OLD, member("new", 0, since=2.0), member("new", 1, since=2.0)]
    assert first_move("new", both, stages=3) is None


def test_the_turn_stays_with_a_peer_that_is_on_its_way() -> None:
    third = member("third", 0, since=3.0)
    watch = VacancyWatch("new", 2)
    watch.look(0.0, [OLD, NEW, third])
    assert watch.look(EMPTY_S, [OLD, NEW, third]) is None, "it is the third's turn"
    assert watch.look(EMPTY_S + 3, [OLD, NEW]) is None, "it has left, and has not arrived"
    assert watch.look(EMPTY_S + TURN_S, [OLD, NEW]) is not None, "it does not come: the next one's turn"


def test_a_peer_that_has_moved_stays_for_a_while_whatever_the_list_says() -> None:
    watch = VacancyWatch("new", 2)
    watch.look(0.0, [OLD, NEW])
    assert watch.look(EMPTY_S, [OLD, NEW]) is not None
    watch.moved(EMPTY_S)
    moves = [now for now in range(10, 700) if watch.look(float(now), [OLD, NEW]) is not None]
    assert moves
    assert moves[0] >= EMPTY_S + MOVE_AGAIN_S


@pytest.mark.parametrize("seed", range(20))
def test_exactly_one_peer_moves_to_each_empty_stage_and_none_is_emptied(seed: int) -> None:
    """All watch the same list; a mover is gone for some seconds and then there."""
    rng = random.Random(seed)
    stages = rng.randint(2, 6)
    where = {f"p{i}": rng.randrange(stages) for i in range(rng.randint(stages + 1, 14))}
    since = {peer: rng.uniform(1, 100) for peer in where}
    watches = {peer: VacancyWatch(peer, stages) for peer in where}
    staffed = set(where.values())
    under_way: dict[str, tuple[float, int]] = {}
    moves: list[Move] = []
    for now in range(120):
        for peer in [peer for peer, (at, _) in under_way.items() if at <= now]:
            where[peer] = under_way.pop(peer)[1]
        members = [member(peer, stage, since[peer]) for peer, stage in sorted(where.items())]
        assert staffed <= {m.stage for m in members}
        for peer in list(where):
            if (move := watches[peer].look(float(now), members)) is not None:
                watches[peer].moved(float(now))
                moves.append(move)
                del where[peer]
                under_way[peer] = now + rng.uniform(1, 8), move.target
    assert set(where.values()) == set(range(stages))
    assert len(moves) == stages - len(staffed), "one for each"
