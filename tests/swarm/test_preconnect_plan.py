"""Groups stand before their round: who dials whom, when, and how often where nobody answers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from peerd.swarm.preconnect_plan import PreconnectPlan

MATES = [f"p{number}" for number in range(6)]


def test_a_long_step_is_let_pass_and_links_are_made_shortly_before_its_end() -> None:
    assembly = PreconnectPlan("p0")
    assert assembly.dial(0.0, 600.0, MATES, []) == []
    assert assembly.wake_in_s(0.0, 600.0) == 590.0
    assert assembly.dial(590.0, 10.0, MATES, ["p3"]) == ["p1", "p2", "p4", "p5"]
    assert assembly.dial(590.1, 9.9, MATES, ["p3"]) == []  # they are being dialled
    assert assembly.wake_in_s(590.1, 9.9) is None


def test_links_are_made_at_once_when_nobody_knows_the_end() -> None:
    assert PreconnectPlan("p0").dial(0.0, None, MATES, []) == MATES[1:]


def test_of_two_peers_the_later_one_waits_for_the_other_to_dial() -> None:
    assembly = PreconnectPlan("p2")
    assert assembly.dial(0.0, None, ["p1", "p2", "p3"], []) == ["p3"]
    assembly.ended(0.1, "p3")
    assert assembly.wake_in_s(0.1, None) == 1.9
    assert assembly.dial(1.0, None, ["p1", "p2", "p3"], ["p1", "p3"]) == []
    assert assembly.dial(9.0, None, ["p1", "p2", "p3"], ["p3"]) == []  # the link has broken: the other's turn anew
    assert assembly.dial(11.0, None, ["p1", "p2", "p3"], ["p3"]) == ["p1"]


def test_who_cannot_be_reached_is_dialled_ever_more_rarely() -> None:
    assembly, now, tries = PreconnectPlan("p0"), 0.0, list[float]()
    while now < 300.0:
        for mate in assembly.dial(now, None, ["p1"], []):
            tries.append(now)
            assembly.ended(now, mate)
        wait_s = assembly.wake_in_s(now, None)
        assert wait_s is not None
        now += wait_s
    assert tries[:6] == [0.0, 2.0, 6.0, 14.0, 30.0, 60.0]
    assert all(later - earlier == 30.0 for earlier, later in pairwise(tries[5:]))


def test_few_are_dialled_at_once() -> None:
    assembly, mates = PreconnectPlan("0"), [f"p{number:02}" for number in range(30)]
    first = assembly.dial(0.0, None, mates, [])
    assert first == mates[:8]
    assembly.ended(0.5, first[0])
    assert assembly.dial(0.5, None, mates, first[:1]) == [mates[8]]


def test_a_look_that_comes_a_hair_too_early_does_not_spin() -> None:
    assembly = PreconnectPlan("p0")
    assert assembly.dial(0.0, 10.000000001, MATES, []) == []
    wait_s = assembly.wake_in_s(0.0, 10.000000001)
    assert wait_s is not None
    assert wait_s >= 0.05


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.sampled_from([None, 3.0, 60.0])), max_size=60))
def test_nobody_is_dialled_who_is_linked_dialled_or_ourselves(moves: list[tuple[bool, int, float | None]]) -> None:
    assembly, under_way, linked = PreconnectPlan("p2"), set[str](), set[str]()
    for number, (ends, which, due_in_s) in enumerate(moves):
        mate = MATES[which]
        if ends and mate in under_way:
            under_way.remove(mate)
            linked.add(mate)
            assembly.ended(float(number), mate)
        elif ends:
            linked.discard(mate)
        for dialled in assembly.dial(float(number), due_in_s, MATES, linked):
            assert dialled not in under_way | linked | {"p2"}
            assert due_in_s != 60.0
            under_way.add(dialled)


def test_who_cannot_be_dialed_dials_at_once_whatever_its_id() -> None:
    assert PreconnectPlan("p2").dial(0.0, None, MATES, [], first=True) == [mate for mate in MATES if mate != "p2"]
