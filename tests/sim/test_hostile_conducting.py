"""Hostile reports of strangers to a conductor over the network: terms, positions, wishes. The run goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from peerd.core.errors import RemoteError, not_conducting
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.core.limits import POSTS, STAGES, TERM_MAX
from peerd.messages.swarm import (
    Conducts,
    Done,
    LineInfo,
    Mb,
    Mbs,
    MemberAnswer,
    MemberSync,
    Position,
    Seqs,
    TrainerAnswer,
    TrainerSync,
    WhoConducts,
)
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.runfile import AveragingSection
from roles.trainer import TrainerRole
from tests.kit.amount import thorough
from tests.kit.declared import ANY
from tests.kit.virtual_time import virtual
from tests.worlds.roles.virtualroles import PacedDevice, Roles, replica_world, virtual_run
from tests.worlds.simulation.world import Node

pytestmark = pytest.mark.slow
Attack = Callable[["Hostile"], Awaitable[None]]


class Hostile:
    """A peer with an identity, the run's fingerprint, and no part in the run."""

    def __init__(self, node: Node, roles: Roles) -> None:
        self.node, self.roles = node, roles
        self.first, self.refused = roles.of(TrainerRole)[0], 0
        self.run = self.first.replica._services.fingerprint

    @property
    def conducting(self) -> Any:
        return self.roles.live[self.roles.conductors()[0]].replica._services.conducting

    async def member(self, **changes: Any) -> MemberAnswer | None:
        lies: dict[str, Any] = {
            **{"run": self.run, "session": 7, "stage": 0, "position": Position(0, b""), "prepared": None, "saved": []},
            **{"held": Mbs(), "counted": Mbs(), "addrs": [str(self.node.addr)], "since": 1.0, "term": 0, "seen": 0},
            "wait_s": 0.0,
        }
        return await self._say("swarm/6/member", MemberSync(**{**lies, **changes}), MemberAnswer)

    async def trainer(self, **changes: Any) -> TrainerAnswer | None:
        lies: dict[str, Any] = {
            **{"run": self.run, "term": 0, "step": 0, "open": Seqs(), "done": [], "seen": 0, "seen_members": 0},
            "wait_s": 0.0,
        }
        return await self._say("swarm/6/trainer", TrainerSync(**{**lies, **changes}), TrainerAnswer)

    async def _say(self, method: str, body: msgspec.Struct, reply: type[Any]) -> Any:
        with suppress(RemoteError):
            return (await self.node.rpc.call(self.conducting._host.id, method, body, reply, timeout_s=5.0)).body
        return None

    def claims_to_conduct(self, term: int) -> None:
        async def who(call: Incoming[WhoConducts]) -> Answer[Conducts]:
            await trio.lowlevel.checkpoint()
            return Answer(Conducts(term))

        self.node.rpc.serve("swarm/6/who", WhoConducts, who, declared=ANY)

    def refuses_all(self) -> None:
        async def refuse(call: Incoming[Any]) -> Answer[Any]:
            self.refused += 1
            raise not_conducting(", somebody should")

        self.node.rpc.serve("swarm/6/member", MemberSync, refuse, declared=ANY)
        self.node.rpc.serve("swarm/6/trainer", TrainerSync, refuse, declared=ANY)


async def names_terms(hostile: Hostile) -> None:
    hostile.claims_to_conduct(TERM_MAX)
    while True:
        await hostile.trainer(term=TERM_MAX)
        await hostile.member(term=TERM_MAX)
        await trio.sleep(0.3)


async def conducts_in_the_next_term(hostile: Hostile) -> None:
    hostile.claims_to_conduct(hostile.conducting.term + 1)
    while True:
        await hostile.trainer(term=hostile.conducting.term + 1)
        await hostile.member(since=1.0)
        await trio.sleep(0.3)


async def stands_far_ahead(hostile: Hostile) -> None:
    session = 0
    while True:
        ahead, session = Position(10**6 + session, b"mine"), session + 1
        held = Mbs.of([Mb(hostile.node.id.text, session)])
        await hostile.member(position=ahead, prepared=ahead, saved=[ahead], session=session, held=held, counted=held)
        await trio.sleep(0.3)


async def only_wishes(hostile: Hostile) -> None:
    while True:
        answer = await hostile.trainer(open=Seqs.of(range(24)))
        await trio.sleep(0.3 if answer is not None else 1.0)


async def credits_others(hostile: Hostile) -> None:
    """It says that honest peers hold what it never sent."""
    number = 0
    while True:
        number += 8
        answer = await hostile.trainer(open=Seqs.of(range(number, number + 8)))
        if answer is not None:
            holder = hostile.first.replica._ctx.host.id.text
            done = [Done(seq, [holder]) for seq in answer.admitted]
            await hostile.trainer(step=answer.step, done=done, open=answer.admitted)
        await trio.sleep(0.3)


async def takes_every_post(hostile: Hostile) -> None:
    """One identity reports from every stage that a message can name, as a member and as a helper."""
    while True:
        for stage in range(0, STAGES, 64):
            await hostile.member(stage=stage)
            await hostile.member(stage=stage, held=None, line=LineInfo("aux", 1e9, 1e9))
        own = hostile.node.id.text
        taken = [post for post in hostile.conducting._driver.heard if post.startswith(own)]
        assert len(taken) <= POSTS + 1, taken
        await trio.sleep(0.3)


def roles_of(folder: Path) -> Roles:
    run = virtual_run(folder, (40_000,), averaging=AveragingSection(sender_timeout_s=2.0))
    return Roles(run, folder / "peers", partial(PacedDevice, 0.03))


@pytest.mark.parametrize(
    ("attack", "within_s"),
    [
        thorough(names_terms, 60.0),
        (conducts_in_the_next_term, 60.0),
        thorough(stands_far_ahead, 60.0),
        thorough(only_wishes, 150.0),
        thorough(credits_others, 150.0),
        (takes_every_post, 60.0),
    ],
)
@virtual
async def test_a_stranger_neither_stops_a_run_nor_takes_it_over(
    tmp_path: Path, attack: Attack, within_s: float
) -> None:
    roles = roles_of(tmp_path)
    async with replica_world(roles, 3, seed=3) as world:
        hostile = Hostile(await world.start("hostile"), roles)
        conductor, began = hostile.conducting, roles.replica_step()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(attack, hostile)
            await trio.sleep(5)
            middle = roles.replica_step()
            went_on = await world.until(lambda: roles.replica_step() >= middle + 10, within_s=within_s)
            nursery.cancel_scope.cancel()
        assert went_on, f"from step {began} to {roles.replica_step()} only\n{roles.story()}"
        assert conductor.acting, "the one whom all follow conducts still"
        assert conductor.term < 100
        assert roles.replica_step() < 10_000


@virtual
async def test_a_peer_that_says_it_came_first_and_refuses_to_conduct_stops_nobody(tmp_path: Path) -> None:
    roles = roles_of(tmp_path)
    async with replica_world(roles, 3, seed=3) as world:
        hostile = Hostile(await world.start("hostile"), roles)
        hostile.refuses_all()
        for _ in range(20):
            await hostile.member(since=1.0)
            await trio.sleep(0.3)
        followings = [role.replica._services.following for role in roles.of(TrainerRole)]
        assert {following.order()[0] for following in followings} == {hostile.node.id}
        (conductor,) = [node for node in world.living() if node.id == hostile.conducting._host.id]
        await world.kill(conductor)
        wanted = roles.replica_step() + 5
        assert await world.until(lambda: roles.replica_step() >= wanted, within_s=30), roles.story()
        assert hostile.refused > 0, "it was asked first"
        await world.start("newcomer", program=roles.program(TrainerRole))
        wanted = roles.replica_step() + 5
        newcomer = roles.live["newcomer"].replica
        assert await world.until(lambda: newcomer.position.step >= wanted, within_s=30), roles.story()


@virtual
async def test_a_hung_member_is_noticed_among_two_hundred_that_nobody_can_reach(tmp_path: Path) -> None:
    roles = roles_of(tmp_path)
    async with replica_world(roles, 3, seed=3) as world:
        hostile = Hostile(await world.start("hostile"), roles)
        conductor = hostile.conducting
        for number in range(200):  # as records of whoever wants to hold the conductor up
            nobody: PeerId = Keypair.from_seed(f"nobody {number}".encode().ljust(32, b".")).peer_id
            conductor._reports._following.note_stage0(nobody, 1.0, False)
        silent = next(n for n in world.living() if n.name.startswith("replica") and n.id != conductor._host.id)
        world.partition([silent])
        gone = silent.id.text
        noticed = await world.until(
            lambda: all(m.peer != gone for m in conductor.machine.members()), within_s=20, step_s=0.5
        )
        assert noticed, roles.story()
        wanted = roles.replica_step() + 3
        assert await world.until(lambda: roles.replica_step() >= wanted, within_s=30), roles.story()
