"""A conductor whose members cannot go on with what they have says so, and goes on when they have found more."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from peerd.messages.swarm import Position
from peerd.swarm.events import ConductorConfig, MemberGone, MemberHello, MoveEnded, Note, Origin, Output, SendMove
from peerd.swarm.positions.phases import Phase
from peerd.swarm.roster import START
from peerd.swarm.steps.conductor import Conductor
from tests.worlds.machines.conducting import hello

KEPT = Position(50, b"kept")


def conductor(announced: int) -> Conductor:
    config = ConductorConfig(stages=2, microbatches=4, first_save=10)
    made = Conductor(config, random.Random(1), 0.0, Origin(own="0a"))
    made.search.announced_step = announced
    return made


def at_stage(peer: str, position: Position = START, saved: tuple[Position, ...] = ()) -> MemberHello:
    return hello(peer, position, stage=int(peer[0]), saved=saved)


def test_fresh_members_of_a_run_that_somebody_keeps_are_lost_until_they_have_it() -> None:
    made = conductor(announced=50)
    made.handle(0.0, at_stage("0a"))
    made.wake(3.0)
    assert not made.lost  # of the other stage there is nobody yet, who may have what is missing
    made.handle(3.0, at_stage("1a"))
    assert not made.lost
    made.wake(5.0)
    assert made.lost
    assert made.current is None
    assert "no position that every stage can reach" in made.waits_for()
    made.handle(6.0, at_stage("0a", saved=(KEPT,)))
    made.handle(6.0, at_stage("1a", saved=(KEPT,)))
    moves = [order for order in made.wake(8.0) if isinstance(order, SendMove)]
    assert [(move.peer, move.target, move.commit) for move in moves] == [("0a", KEPT, False), ("1a", KEPT, False)]
    assert not made.lost
    for move in moves:
        made.handle(8.5, MoveEnded(move.peer, KEPT))
    assert (made.phase, made.current, made.lost) == (Phase.OPEN, KEPT, False)


def test_without_anything_kept_fresh_members_begin_at_the_start() -> None:
    made = conductor(announced=9)
    made.handle(0.0, at_stage("0a"))
    made.handle(0.0, at_stage("1a"))
    made.wake(2.0)
    assert (made.current, made.lost) == (START, False)


def test_a_stage_that_comes_back_with_nothing_is_lost_after_a_while() -> None:
    made, here = conductor(announced=60), Position(60, b"now")
    for peer in ("0a", "1a"):
        made.handle(0.0, at_stage(peer, here, saved=(here,)))
    made.wake(2.0)
    assert made.current == here
    made.handle(3.0, MemberGone("1a"))
    made.handle(3.5, at_stage("1b"))
    assert not made.lost
    made.wake(7.9)
    assert made.lost
    assert made.wake_at(7.9) > 8.0  # it does not look again and again meanwhile
    version = made.members_version
    made.handle(9.0, at_stage("1b", saved=(KEPT,)))
    assert made.lost
    made.handle(9.0, at_stage("0a", here, saved=(here, KEPT)))
    assert made.phase is Phase.GATHERING
    assert made.members_version > version
    made.wake(11.0)
    assert not made.lost


# --- forsaken -----------------------------------------------------------------------------------------------------

SAVED, HERE, FRESH = Position(30, b"saved"), Position(34, b"here"), Position(1, b"fresh")


def forsaking(known: dict[str, int] | None = None) -> Conductor:
    """Two stages at step 34, of which peers have checkpoints of step 30."""
    config = ConductorConfig(
        stages=2, microbatches=4, first_save=10, forsake_s=3.0, forsake_unseen_s=20.0, forsake_most_s=600.0
    )
    return Conductor(config, random.Random(1), 0.0, Origin(own="0a", established=known or {}))


def here(peer: str, digest: bytes = b"mean") -> MemberHello:
    return replace(at_stage(peer, HERE, saved=(SAVED,)), digest=digest)


def steps(made: Conductor, begin: float, end: float) -> list[tuple[float, Output]]:
    """What it wants done, each second; members go where they are sent."""
    found: list[tuple[float, Output]] = []
    now = begin
    while now <= end:
        outputs = made.wake(now)
        while outputs:
            found += [(now, output) for output in outputs]
            moves = [output for output in outputs if isinstance(output, SendMove)]
            outputs = [further for move in moves for further in made.handle(now, MoveEnded(move.peer, move.target))]
        now += 0.5
    return found


def warnings(found: list[tuple[float, Output]]) -> list[tuple[float, str]]:
    return [(at, output.text) for at, output in found if isinstance(output, Note) and output.warning]


def test_a_state_that_went_with_its_last_peer_is_forsaken_and_the_loss_is_said_once() -> None:
    made = forsaking()
    made.handle(0.0, here("0a"))
    made.handle(0.0, here("1a"))
    steps(made, 0.5, 5.0)
    assert made.current == HERE
    made.handle(6.0, MemberGone("1a"))
    made.handle(7.0, at_stage("1b"))
    found = steps(made, 7.0, 30.0)
    said = "stage 1 was lost with its last peer: the swarm goes back from step 34 to step 0"
    assert [text for _, text in warnings(found)] == [said]
    assert made.current == START
    assert warnings(found)[0][0] <= 6.0 + 4.0 + 3.0 + 2.0


def test_a_checkpoint_that_comes_back_in_time_is_gone_back_to() -> None:
    made = forsaking()
    made.handle(0.0, here("0a"))
    made.handle(0.0, here("1a"))
    steps(made, 0.5, 5.0)
    made.handle(6.0, MemberGone("1a"))
    made.handle(7.0, at_stage("1a", SAVED, saved=(SAVED,)))
    found = steps(made, 7.0, 30.0)
    said = "stage 1 was lost with its last peer: the swarm goes back from step 34 to step 30"
    assert [text for _, text in warnings(found)] == [said]
    assert made.current == SAVED


def test_what_was_forsaken_is_taken_up_again_when_its_peer_comes_back() -> None:
    made = forsaking({"0a": 0, "1a": 1})
    made.handle(0.0, here("0a"))
    made.handle(0.0, here("1a"))
    steps(made, 0.5, 5.0)
    made.handle(6.0, MemberGone("1a"))
    made.handle(7.0, at_stage("1b"))
    steps(made, 7.0, 30.0)
    assert made.current == START
    made.handle(31.0, at_stage("1liar", SAVED, saved=(SAVED,)))
    steps(made, 31.0, 40.0)
    assert made.current == START, "a stranger's word takes no swarm ahead"
    made.handle(41.0, MemberGone("1liar"))
    made.handle(41.0, at_stage("0a", START, saved=(SAVED,)))
    made.handle(42.0, at_stage("1a", SAVED, saved=(SAVED,)))
    steps(made, 42.0, 60.0)
    assert made.current == SAVED


def test_a_stage_lost_with_the_conductor_is_waited_for_longer_and_a_whole_run_that_comes_back_much_longer() -> None:
    for digest, least, most in ((b"mean", 20.0, 30.0), (b"", 600.0, 620.0)):
        made = forsaking()
        made.handle(0.0, at_stage("0a"))
        made.handle(0.0, here("1a", digest=digest))
        found = steps(made, 0.5, 640.0)
        ((at, text),) = warnings(found)
        assert least <= at <= most
        assert text == "stage 0 was lost with its last peer: the swarm goes back from step 34 to step 0"


def test_a_stage_of_which_nobody_can_be_reached_any_more_is_forsaken_soon() -> None:
    made = forsaking()
    made.search.nobody_has = True
    made.handle(0.0, at_stage("0a"))
    made.handle(0.0, here("1a"))
    ((at, text),) = warnings(steps(made, 0.5, 60.0))
    assert at <= 7.0
    assert text == "stage 0 was lost with its last peer: the swarm goes back from step 34 to step 0"


def test_a_whole_run_that_comes_back_is_waited_for_though_nobody_can_be_reached_yet() -> None:
    made = forsaking()
    made.search.nobody_has = True
    made.handle(0.0, at_stage("0a"))
    made.handle(0.0, here("1a", digest=b""))
    assert warnings(steps(made, 0.5, 590.0)) == []


@pytest.mark.parametrize(("agree", "least", "most"), [(False, 60.0, 70.0), (True, 600.0, 620.0)])
def test_claims_of_a_few_strangers_hold_a_new_run_up_for_a_minute_those_of_a_run_that_comes_back_for_ten(
    agree: bool, least: float, most: float
) -> None:
    made = forsaking()
    for peer in ("0a", "1a", "1b"):
        made.handle(0.0, at_stage(peer))
    for number in range(3):
        made.handle(0.0, at_stage(f"1liar{number}", HERE if agree else Position(34 + number, b"made up")))
    found = steps(made, 0.5, 640.0)
    begun = [at for at, output in found if isinstance(output, SendMove)]
    assert begun
    assert least <= begun[0] <= most


def test_what_a_keeper_keeps_is_waited_for() -> None:
    made = forsaking()
    made.handle(0.0, here("0a"))
    made.handle(0.0, here("1a"))
    steps(made, 0.5, 5.0)
    made.search.kept_step = 30
    made.handle(6.0, MemberGone("1a"))
    made.handle(7.0, at_stage("1b"))
    steps(made, 7.0, 60.0)
    assert made.lost
    assert "the run begins anew after 600 s" in made.search.problem()
    made.handle(60.0, at_stage("1b", saved=(SAVED,)))
    ((_, text),) = warnings(steps(made, 60.0, 70.0))
    assert text.endswith("from step 34 to step 30")
    assert made.current == SAVED


def test_a_large_checkpoint_that_a_keeper_has_is_waited_for_as_long_as_its_bytes_take() -> None:
    config = ConductorConfig(
        stages=2, microbatches=4, first_save=10, forsake_s=3.0, forsake_most_s=600.0, fetch_s=7200.0
    )
    made = Conductor(config, random.Random(1), 0.0, Origin(own="0a"))
    for event in (at_stage("0a"), at_stage("1a")):
        made.handle(0.0, event)
    made.search.kept_step = 30
    steps(made, 1.0, 7000.0)
    assert made.lost
    assert "the run begins anew after 7800 s" in made.search.problem()
    for peer in ("0a", "1a"):
        made.handle(7000.0, at_stage(peer, saved=(SAVED,)))
    steps(made, 7000.0, 7100.0)
    assert made.current == SAVED


def test_a_stranger_that_takes_its_claim_back_and_repeats_it_delays_a_start_no_longer() -> None:
    config = ConductorConfig(stages=2, microbatches=4, first_save=10, gather_s=1.0, forsake_most_s=600.0)
    made = Conductor(config, random.Random(1), 0.0, Origin(own="0a"))
    far = Position(10**9, b"made up")
    for event in (at_stage("0a"), at_stage("1a"), at_stage("0liar", far)):
        made.handle(0.0, event)
    now = claimed = 0.0
    while made.phase is Phase.GATHERING and now < 10_000.0:
        now += 1.0
        made.wake(now)
        if made.lost and now - claimed >= 500.0:
            made.handle(now, at_stage("0liar"))
            made.handle(now + 0.5, at_stage("0liar", far))
            claimed = now
    assert made.phase is not Phase.GATHERING
    assert now < 700.0
