"""Stage peers that hand microbatches on to each other train exactly like one process, whoever dies in mid-step.

3 stages x 2 peers and 2 trainers, ten global steps, lossless. What dies: a predecessor after it sent, a successor
before its backward, both of one route, the conductor, the only link between two healthy peers; or a peer has no room
for what it should keep; or every call is sent to two peers. In virtual time, and one case over TCP.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from peerd.core.errors import Unreachable
from peerd.messages.handover import PassRequest
from peerd.model.stage.stage_module import StageModule
from peerd.pipeline import direct
from peerd.pipeline.hedging import Hedged
from peerd.pipeline.next_stage import NextStage
from peerd.pipeline.routes.call_times import CallTimes
from peerd.pipeline.stage.handover import HandOver
from peerd.pipeline.stage_peers import StagePeers
from peerd.rpc.rpc import Incoming
from peerd.run.runfile import RunFile
from roles.trainer import TrainerRole
from tests.kit.amount import few
from tests.kit.exact import Batches, differences, plain_torch, run_file, write_texts
from tests.kit.runs import changed
from tests.worlds.machines.in_turn import InTurn
from tests.worlds.roles.training import Peer, all_finished, events, stage_peers, swarm

pytestmark = pytest.mark.slow
STAGES = 3
OVERTAKEN = Counter[int]()  # calls that a mate answered first, by stage
HELD_BACK_S = 0.1  # at most, for the mate's answer
FIRST_DEATH = 4  # the step in which somebody dies, or a later one
Deaths = Callable[[list[Peer], pytest.MonkeyPatch], None]


def of_stage(peers: list[Peer], stage: int, conducts: bool = False) -> Peer:
    """A peer of a stage, which conducts, or does not."""
    found = [p for p in peers if p.role.post.stage == stage and p.role._services.conducting.acting == conducts]
    return found[0]


def killing(
    victims: list[Peer],
    peers: list[Peer],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    due: Callable[[HandOver, Incoming[PassRequest]], bool],
) -> None:
    """Cut the victims off when `method` of a hand-over is called and that is `due`, in a step that is old enough and
    that all `peers` have come to: a stage that loses the last peer with its state goes back to the start.

    Each peer gets its turn: a step takes so little here that which peer is quicker is chance.
    """
    monkeypatch.setattr(direct, "CheapestRoute", lambda rng: InTurn())
    original = getattr(HandOver, method)

    async def meanwhile(self: HandOver, call: Incoming[PassRequest], *args: Any) -> Any:
        step = call.body.ticket.step
        if step >= FIRST_DEATH and due(self, call) and not victims[0].scope.cancel_called:
            for peer in peers:
                while peer.role.position.step < step:
                    await peer.role.post.state.stepped.wait()
            if all(p.role.position.step == step for p in peers):
                for peer in victims:
                    peer.kill()
        return await original(self, call, *args)

    monkeypatch.setattr(HandOver, method, meanwhile)


def before_its_backward(victims: list[Peer], peers: list[Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    first = victims[0].role.post.handover
    killing(victims, peers, monkeypatch, "_backward", lambda handover, call: handover is first)


def a_predecessor_that_has_sent(peers: list[Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    victim = of_stage(peers, 1)
    killing([victim], peers, monkeypatch, "_do", lambda handover, call: call.peer == victim.host.id)


def a_successor_before_its_backward(peers: list[Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    before_its_backward([of_stage(peers, 1)], peers, monkeypatch)


def both_of_one_route(peers: list[Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    before_its_backward([of_stage(peers, 1), of_stage(peers, 2)], peers, monkeypatch)


def the_conductor(peers: list[Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    before_its_backward([of_stage(peers, 0, conducts=True)], peers, monkeypatch)


def the_only_link(peers: list[Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody of stage 1 gets through to one of stage 2, the first that is asked then, whose mate is dead."""
    last = {p.host.id.text: p for p in peers if p.role.post.stage == 2}
    lonely: list[str] = []
    original = NextStage._ask

    async def ask(self: NextStage, name: str, task: Any) -> Any:
        if name in last and not lonely and last[name].role.position.step >= FIRST_DEATH:
            lonely.append(name)
            (gone,) = last.keys() - {name}
            last[gone].kill()
        if name in lonely:
            raise Unreachable("the link is cut", last[name].host.id)
        return await original(self, name, task)

    monkeypatch.setattr(NextStage, "_ask", ask)


def a_full_stash(peers: list[Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    """One peer has room for one microbatch a step: less than it is ever asked to take."""
    monkeypatch.setattr(direct, "CheapestRoute", lambda rng: InTurn())
    handover = of_stage(peers, 1).role.post.handover
    handover.room_for = lambda kept: 1
    handover.look_for_room()


def every_call_twice(peers: list[Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody dies, and every call is late at once: two peers race for all that can be done by either.

    Of every second call the answer of whoever was asked first comes last.
    """
    overtaken, first, count = StagePeers.overtaken, Hedged.first, itertools.count()

    async def held_back(self: Hedged[Any], name: str, late_after_s: float | None) -> Any:
        if next(count) % 2:
            ask, mate_ended = self._ask, trio.Event()

            async def ask_slowly(whom: str) -> Any:
                try:
                    answer = await ask(whom)
                finally:
                    if whom != name:
                        mate_ended.set()
                with trio.move_on_after(HELD_BACK_S):  # there may be no mate
                    await mate_ended.wait()
                return answer

            self._ask = ask_slowly
        return await first(self, name, late_after_s)

    def noted(self: StagePeers, stage: int, *more: Any) -> None:
        OVERTAKEN[stage] += 1
        overtaken(self, stage, *more)
        self.wiring(stage).rested(more[0])  # else everybody rests soon

    OVERTAKEN.clear()
    monkeypatch.setattr(CallTimes, "late_after_s", lambda self, name: 0.0)
    monkeypatch.setattr(CallTimes, "can_hedge", lambda self, late: True)
    monkeypatch.setattr(StagePeers, "overtaken", noted)
    monkeypatch.setattr(Hedged, "first", held_back)


def nobody(peers: list[Peer], monkeypatch: pytest.MonkeyPatch) -> None: ...


async def train(directory: Path, run: RunFile, deaths: Deaths, monkeypatch: pytest.MonkeyPatch) -> list[Peer]:
    """Ten steps; returns the stage peers that live."""
    async with swarm(directory) as s:
        stages = await stage_peers(s, run, 2 * STAGES)
        with trio.fail_after(30):
            for peer in stages:
                await peer.ready.wait()
            while not any(peer.role._services.conducting.acting for peer in stages):
                await stages[0].role._services.following.told.wait()
        deaths(stages, monkeypatch)
        trainers = [await s.start(f"trainer{i}", TrainerRole, run) for i in range(2)]
        await all_finished(s, trainers, within_s=90)
        for trainer in trainers:
            assert trainer.role.status()["microbatches"]["lost"] == 0
        return [peer for peer in stages if not peer.scope.cancel_called]


@pytest.mark.parametrize(
    ("deaths", "optimizer", "dtype"),
    few(
        itertools.product(
            (
                nobody,
                a_predecessor_that_has_sent,
                a_successor_before_its_backward,
                both_of_one_route,
                the_conductor,
                the_only_link,
                a_full_stash,
                every_call_twice,
            ),
            ("sgd", "adamw"),
            ("float32", "float64"),
        ),
        (a_predecessor_that_has_sent, "adamw", "float64"),
        (both_of_one_route, "adamw", "float64"),
    ),
)
async def test_a_swarm_that_hands_over_trains_exactly_like_one_process(
    tmp_path: Path,
    autojump_clock: MockClock,
    batches: Batches,
    monkeypatch: pytest.MonkeyPatch,
    deaths: Deaths,
    optimizer: str,
    dtype: str,
) -> None:
    await trains_exactly(tmp_path, run_of(tmp_path, optimizer, dtype), deaths, batches, monkeypatch)


@pytest.mark.socket
@pytest.mark.no_watchdog("nine peers and the threads of their workers share one interpreter")
async def test_a_swarm_that_loses_both_peers_of_a_route_trains_exactly_like_one_process_over_tcp(
    tmp_path: Path, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trains_exactly(tmp_path, run_of(tmp_path, "adamw", "float64"), both_of_one_route, batches, monkeypatch)


def run_of(folder: Path, optimizer: str, dtype: str) -> RunFile:
    run = run_file(optimizer, dtype, write_texts(folder), stages=STAGES)
    return changed(run, model={"layers": STAGES})


async def trains_exactly(
    folder: Path, run: RunFile, deaths: Deaths, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    living = await train(folder / "peers", run, deaths, monkeypatch)
    dead = {nobody: 0, every_call_twice: 0, a_full_stash: 0, both_of_one_route: 2}.get(deaths, 1)
    assert len(living) == 2 * STAGES - dead
    if deaths is a_full_stash:
        assert sum(peer.role.post.handover.refused_full for peer in living) > 0
    if deaths is every_call_twice:
        assert set(OVERTAKEN) == set(range(STAGES))
    modules: list[StageModule] = [peer.role.post.served.module for peer in living]
    assert batches.faults(per_step=8) == [], "\n".join(events(living))
    assert differences(run, plain_torch(run, batches), modules) == []
