"""Random swarms under one conductor after another: whatever dies, every step averages one whole batch, once."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from peerd.messages.swarm import LineInfo, Mb
from peerd.swarm.events import CancelAttempt, ConductorConfig, MemberGone, PrepareEnded, SendMove, SendPrepare
from peerd.swarm.positions.phases import Phase
from peerd.swarm.steps import step_cycle
from peerd.swarm.steps.conductor import Conductor
from tests.kit.amount import some
from tests.worlds.machines.conducting import first_order
from tests.worlds.machines.modelswarm import BATCH, STAGES, RememberingSwarm, WeighingSwarm


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("seed", some(range(24), 4))
def test_every_step_averages_one_whole_batch_whatever_dies(
    seed: int, delayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 3 == 2:  # as with a large batch: one stage after the other begins to average
        monkeypatch.setattr(step_cycle, "_AT_ONCE", 1)
    swarm = RememberingSwarm(seed, delayed)
    for _ in range(1500):
        swarm.happen(faults=True)
    swarm.check()
    swarm.clients = False  # a stage of clients alone waits for somebody who can sum
    before = max(position.step for _, position in swarm.histories)
    for _ in range(1500):
        swarm.happen(faults=False)
    swarm.check()
    after = max(position.step for _, position in swarm.histories)
    assert after >= before + 3, f"the swarm stalled at step {after} (seed {seed}): {swarm.conductor.waits_for()}"
    assert (swarm.stale > 0) == delayed


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("seed", some(range(12), 3))
def test_every_step_averages_one_whole_batch_whoever_rests(seed: int, delayed: bool) -> None:
    swarm = WeighingSwarm(seed, delayed)
    for _ in range(2500):
        swarm.happen(faults=True)
    swarm.check()
    swarm.clients = False
    before = max(position.step for _, position in swarm.histories)
    for _ in range(2500):
        swarm.happen(faults=False)
    swarm.check()
    after = max(position.step for _, position in swarm.histories)
    assert after >= before + 3, f"the swarm stalled at step {after} (seed {seed}): {swarm.conductor.waits_for()}"


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("seed", some(range(12), 3))
def test_a_conductor_counts_the_whole_batch_of_each_step_that_it_saw_made(seed: int, delayed: bool) -> None:
    """Whatever happens on the way: attempts that fail and are repeated, batches that shrink, members that die.

    Nobody made a step that all members of a stage died in.
    """
    swarm = RememberingSwarm(seed, delayed)
    tenures, ended, made = dict[int, Conductor](), Counter[int](), Counter[int]()
    for faults in (True, False):
        for _ in range(1000):
            swarm.happen(faults=faults)
            conductor, key = swarm.conductor, id(swarm.conductor)
            tenures[key] = conductor
            if conductor.course.steps_made > ended[key]:
                ended[key] = conductor.course.steps_made
                made[key] += all(conductor.roster.at(stage, conductor.current) for stage in range(STAGES))
    for key, conductor in tenures.items():
        work = conductor.counted_work
        assert sum(one.brought for one in work.of.values()) == made[key] * BATCH
        assert sum(one.computed for one in work.of.values()) == made[key] * BATCH * STAGES
        assert (work.since_step is None) == (not made[key])
    assert made.total() >= 5, "hardly anything happened"


def test_in_such_swarms_members_do_rest() -> None:
    rested = 0
    for seed in range(4):
        swarm = WeighingSwarm(seed)
        for _ in range(2000):
            swarm.happen(faults=False)
        rested += len(swarm.rested)
    assert rested


@pytest.mark.parametrize("delayed", [False, True])
def test_a_swarm_without_faults_steps_on_and_on(delayed: bool) -> None:
    swarm = RememberingSwarm(99, delayed)
    for _ in range(2000):
        swarm.happen(faults=False)
    swarm.check()
    assert max(position.step for _, position in swarm.histories) >= 8
    assert swarm.helped
    assert swarm.conductor.phase in (Phase.OPEN, Phase.CLOSING, Phase.MOVING)


@pytest.mark.parametrize("delayed", [False, True])
def test_a_trainer_that_misses_whole_steps_hears_what_became_of_its_batch(delayed: bool) -> None:
    swarm = RememberingSwarm(99, delayed)
    for _ in range(600):
        swarm.happen(faults=False)
    swarm.replace_conductor()  # the new one has not heard of a trainer that sleeps
    swarm.asleep = "t2"
    for _ in range(1200):
        swarm.happen(faults=False)
    assert swarm.conductor.current is not None
    assert swarm.conductor.current.step > swarm.trainers["t2"].step + 1
    swarm.asleep = ""
    for _ in range(200):
        swarm.happen(faults=False)
    assert swarm.overslept
    swarm.check()


CONFIG = ConductorConfig(stages=1, microbatches=1, gather_s=1.0)


def closing(modes: dict[str, str]) -> tuple[Conductor, list[SendPrepare]]:
    """One stage whose members have such lines, with a batch that is whole: what the conductor orders."""
    conductor = Conductor(CONFIG, random.Random(1), 0.0)
    for peer, mode in modes.items():
        line = LineInfo(mode, 1e6, 2e6, 100_000, "float32")  # type: ignore[arg-type]
        conductor.said_of_line(0.0, peer, 0, line, ("/ip4/10.0.0.1/tcp/1",))
    members = [peer for peer, mode in modes.items() if mode != "aux"]
    return conductor, first_order(conductor, members, min(modes))


def test_members_that_nobody_can_reach_wait_for_a_helper() -> None:
    conductor, orders = closing({"a": "client", "b": "client"})
    assert not orders
    assert "nobody may sum" in conductor.waits_for()
    conductor.said_of_line(3.0, "h", 0, LineInfo("aux", 1e6, 1e6))
    orders = [o for o in conductor.wake(3.0) if isinstance(o, SendPrepare)]
    assert [o.peer for o in orders] == ["a", "b", "h"]
    assert orders[0].split is not None
    assert [p.share for p in orders[0].split.parties] == [0, 0, 1]
    assert not conductor.waits_for()


def test_a_helper_that_fails_is_put_aside_at_once_and_for_longer_each_time() -> None:
    conductor, orders = closing({"a": "node", "b": "node", "h": "aux"})
    assert [m.peer for m in conductor.members()] == ["a", "b", "h"]
    assert [m.ready for m in conductor.members()] == [True, True, False]
    now, aside = 2.0, []
    for _ in range(3):
        conductor.handle(now, PrepareEnded("a", orders[0].attempt, False, (), ("h",)))
        assert [m.peer for m in conductor.members()] == ["a", "b"]
        began = now
        while "h" not in [m.peer for m in conductor.members()]:
            now += 1.0
            conductor.said_of_line(now, "h", 0, LineInfo("aux", 1e6, 1e6))
        aside.append(now - began)
        orders = [o for o in conductor.wake(now) if isinstance(o, SendPrepare)] or orders
        for o in orders:  # the round without it is called off
            conductor.handle(now, PrepareEnded(o.peer, o.attempt, False, (Mb("t", 9),)))
        now += 6.0
        orders = [o for o in conductor.wake(now) if isinstance(o, SendPrepare)]
    assert aside == [15.0, 30.0, 60.0]


def test_a_helper_never_commits_and_is_not_waited_for() -> None:
    conductor, orders = closing({"a": "node", "b": "node", "h": "aux"})
    assert [o.peer for o in orders] == ["a", "b", "h"]
    assert orders[2].assigned == ()
    moves = [o for peer in "ab" for o in conductor.handle(2.0, PrepareEnded(peer, orders[0].attempt, True))]
    assert [(o.peer, o.commit) for o in moves if isinstance(o, SendMove)] == [("a", True), ("b", True)]
    assert conductor.handle(2.0, PrepareEnded("h", orders[0].attempt, False)) == []


def test_a_helper_that_goes_ends_the_attempt_it_sums_in() -> None:
    conductor, orders = closing({"a": "node", "b": "node", "h": "aux"})
    out = conductor.handle(2.0, MemberGone("h"))
    assert CancelAttempt(orders[0].attempt) in out
    again = [o for o in out if isinstance(o, SendPrepare)]
    assert [o.peer for o in again] == ["a", "b"]
