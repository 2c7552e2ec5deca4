"""Contributions by the conductor's ledger, in virtual time: a liar's own word comes last, and counts outlive their
conductor.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import trio

from peerd.run.runfile import BatchSection, PipelineSection
from peerd.status.swarm_status import SwarmStatus
from peerd.status.swarm_view import swarm_view
from peerd.swarm.contributions import ContributionOf, ContributionTally
from tests.kit.virtual_time import virtual
from tests.worlds.roles.virtualroles import PacedDevice, Roles, pipeline_world, replica_world, virtual_run
from tests.worlds.simulation.world import World

pytestmark = pytest.mark.slow
LIE = 10**15
BATCH = 24


async def boast(world: World, roles: Roles) -> str:
    """A peer that serves nothing joins, and claims a lot in two roles."""
    liar = await world.start("liar")
    for role in ("stage", "trainer"):
        tally = ContributionTally(ContributionOf(roles.run.run, role), liar.dht, liar.clock, None)
        tally.add(samples=LIE)
        await tally.publish()
    return liar.id.text


async def board(world: World, roles: Roles) -> SwarmStatus:
    """The run as the backbone sees it."""
    boot = world.nodes["boot"]
    return await swarm_view(boot.dht, roles.run, None, boot.clock.wall())


async def counted_by(world: World, roles: Roles, *names: str, after: int = 0) -> SwarmStatus:
    """The run, once its counts are those of one of these peers, and of a step later than `after`."""
    seen = SwarmStatus()
    for _ in range(60):
        seen = await board(world, roles)
        head = seen.counted
        if head is not None and head.by in [world.nodes[name].id.text for name in names] and head.step > after:
            return seen
        await trio.sleep(2)
    pytest.fail(f"nobody of {names} counts: {seen.counted}\n{roles.story()}")


def sums(swarm: SwarmStatus) -> tuple[int, int]:
    """Samples computed and brought by all peers, as counted."""
    rows = [row.counted for row in swarm.contributions if row.counted is not None]
    return sum(row.samples for row in rows), sum(row.brought for row in rows)


@virtual
async def test_samples_are_counted_in_each_stage_and_a_liar_that_gave_nothing_stands_last(tmp_path: Path) -> None:
    run = virtual_run(
        tmp_path,
        (40_000,),
        stages=2,
        pipeline=PipelineSection(stages=2, microbatch=4),
        batch=BatchSection(target_samples=BATCH),
    )
    roles = Roles(run, tmp_path / "peers", partial(PacedDevice, 0.3))
    async with pipeline_world(roles, 3, "trainer") as world:
        liar = await boast(world, roles)
        swarm = await counted_by(world, roles, *roles.conductors())
        head, rows = swarm.counted, swarm.contributions
        steps = head.step - head.since_step
        assert head.since_step == 0
        assert steps >= 3
        assert sums(swarm) == (2 * BATCH * steps, BATCH * steps), "each sample counts in each of two stages"
        workers = {world.nodes[name].id.text for name in ("stage0", "stage1", "stage2", "trainer")}
        assert {row.peer for row in rows if row.counted} == workers
        assert (rows[-1].peer, rows[-1].samples, rows[-1].counted) == (liar, LIE, None)


def check(before: SwarmStatus, after: SwarmStatus) -> None:
    """Nobody's count has shrunk, and of the steps in between at most some seconds are not in the counts."""
    assert after.counted.by != before.counted.by
    assert after.counted.since_step == before.counted.since_step == 0
    old, new = (
        {row.peer: row.counted.samples for row in seen.contributions if row.counted} for seen in (before, after)
    )
    assert all(new[peer] >= samples for peer, samples in old.items())
    assert sum(old.values()) < sum(new.values()) <= BATCH * after.counted.step


@virtual
async def test_counts_go_on_when_one_conductor_dies_and_the_next_one_leaves(tmp_path: Path) -> None:
    pipeline, batch = PipelineSection(microbatch=4), BatchSection(target_samples=BATCH)
    run = virtual_run(tmp_path, (40_000,), pipeline=pipeline, batch=batch)
    roles = Roles(run, tmp_path / "peers", partial(PacedDevice, 0.5))
    async with replica_world(roles, 4) as world:
        names = [f"replica{number}" for number in range(4)]
        last = names[-1]
        for tally in roles.live[last]._services._tallies.values():  # it works, and says that it did a lot more
            tally.add(samples=LIE)
        await boast(world, roles)
        before = await counted_by(world, roles, *roles.conductors())
        for how in ("dies", "leaves"):
            [conductor] = roles.conductors()
            at = roles.replica_step()
            if how == "dies":
                await world.kill(world.nodes[conductor])
            else:  # as a daemon ends
                await world.nodes[conductor].dht.withdraw_all()
                await world.stop(world.nodes[conductor])
            names.remove(conductor)
            assert await world.until(lambda at=at: roles.replica_step() >= at + 3, within_s=120), roles.story()
            after = await counted_by(world, roles, *names, after=before.counted.step)
            check(before, after)
            assert after.contributions[-1].peer == world.nodes["liar"].id.text
            before = after
        first = before.contributions[0]
        shares = {row.peer: row.counted.samples for row in before.contributions if row.counted}
        assert len(shares) == 4, "those that died keep what they gave"
        assert shares[first.peer] == max(shares.values())
        claimed = next(row for row in before.contributions if row.peer == world.nodes[last].id.text)
        assert claimed.samples >= LIE
        assert claimed.counted.samples <= BATCH * (before.counted.step - before.counted.since_step)
