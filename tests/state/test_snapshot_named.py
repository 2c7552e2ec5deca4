"""Named offers of donors (totals of steps, and kept checkpoints), and where a fetched state is stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from peerd.core.errors import NoMemory, Overloaded, ProtocolViolation, Refused, RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import STATE_NAMED_COPIES
from peerd.messages.state import StateItem, StateManifest, StateRequest, TensorSpec
from peerd.messages.swarm import Position
from peerd.rpc.rpc import Rpc
from peerd.state.snapshot import SnapshotFetcher, StateServer
from peerd.state.state_server import STATE, Methods
from tests.state.test_snapshot import RUN, peers, state
from tests.worlds.machines.workers import InlineWorker

TOTAL = [TensorSpec("total", "float32", (600_000,))]
KEPT = Methods("kept/1/manifest", "kept/1/digests", "kept/1/piece", "kept/1/release", ahead=0)
WORKER = InlineWorker()


def total(value: int) -> list[StateItem]:
    (item,) = state(value, (2_400_000,))
    return [StateItem("total", "float32", (600_000,), item.payload)]


def at(step: int) -> Position:
    return Position(step, b"x")


def giver(rpc: Rpc, value: int = 1, skips: int = 1, methods: Methods = STATE) -> StateServer:
    """Gives one and the same total for every step, and says that it leads `skips` steps on."""
    giving = StateServer(rpc, methods)

    async def named(of: Position) -> tuple[Position, list[StateItem]] | None:
        await trio.lowlevel.checkpoint()
        return None if of.step > 90 else (at(of.step + skips), total(value))

    giving.offer_named(RUN, 1, named, WORKER)
    return giving


async def fetch(
    rpc: Rpc, donors: list[PeerId], of: int = 7, methods: Methods = STATE
) -> tuple[SnapshotFetcher, Position, bytes]:
    fetcher = SnapshotFetcher(rpc, methods=methods)
    position, (item,), _ = await fetcher.fetch(donors, StateRequest(RUN, 1, of=at(of)), TOTAL, WORKER)
    return fetcher, position, bytes(item.payload)


async def test_a_total_comes_with_the_position_that_it_leads_to(autojump_clock: MockClock) -> None:
    async with peers(4) as (_, [(a, rpc_a), (b, rpc_b), (c, rpc_c), (_, joiner)]):
        for rpc in (rpc_a, rpc_b, rpc_c):
            giver(rpc)
        fetcher, position, data = await fetch(joiner, [a, b, c])
    assert position == at(8)
    assert data == bytes(total(1)[0].payload)
    assert fetcher.report is not None
    assert fetcher.report.liars == []


async def test_another_total_is_outvoted(autojump_clock: MockClock) -> None:
    async with peers(4) as (_, [(a, rpc_a), (b, rpc_b), (c, rpc_c), (_, joiner)]):
        for rpc, value in ((rpc_a, 1), (rpc_b, 2), (rpc_c, 1)):
            giver(rpc, value)
        _, _, data = await fetch(joiner, [a, b, c])
    assert data == bytes(total(1)[0].payload)


async def test_two_that_contradict_each_other_are_not_believed(autojump_clock: MockClock) -> None:
    async with peers(3) as (_, [(a, rpc_a), (b, rpc_b), (_, joiner)]):
        giver(rpc_a, 1)
        giver(rpc_b, 2)
        with pytest.raises(RemoteError, match="no 2 donors agree"):
            await fetch(joiner, [a, b])


@pytest.mark.parametrize("skips", [0, 2, 1 << 40])
async def test_a_total_that_leads_elsewhere_is_a_lie_and_named(autojump_clock: MockClock, skips: int) -> None:
    async with peers(2) as (_, [(donor, rpc), (_, joiner)]):
        giver(rpc, skips=skips)
        with pytest.raises(ProtocolViolation) as caught:
            await fetch(joiner, [donor])
    assert caught.value.peer == donor


async def test_a_checkpoint_of_another_step_is_a_lie_too(autojump_clock: MockClock) -> None:
    async with peers(3) as (_, [(liar, rpc_a), (donor, rpc_b), (_, joiner)]):
        giver(rpc_a, skips=1, methods=KEPT)
        giver(rpc_b, skips=0, methods=KEPT)
        with pytest.raises(ProtocolViolation):
            await fetch(joiner, [liar], methods=KEPT)
        fetcher, position, _ = await fetch(joiner, [liar, donor], methods=KEPT)
    assert position == at(7)
    assert fetcher.report is not None
    assert fetcher.report.liars == [liar.text]


async def test_after_a_swarm_went_back_the_step_that_it_made_then_is_given(autojump_clock: MockClock) -> None:
    """Of the step that it had made before from there, a copy is still around."""
    made = [(Position(8, b"before"), total(1)), (Position(8, b"now"), total(2))]

    async def named(of: Position) -> tuple[Position, list[StateItem]] | None:
        await trio.lowlevel.checkpoint()
        return made[0] if made else None

    async with peers(2) as (_, [(donor, rpc), (_, joiner)]):
        StateServer(rpc, STATE).offer_named(RUN, 1, named, WORKER)
        assert (await fetch(joiner, [donor]))[1] == Position(8, b"before")
        del made[0]
        _, position, data = await fetch(joiner, [donor])
        assert (position, data) == (Position(8, b"now"), bytes(total(2)[0].payload))
        made.clear()
        assert (await fetch(joiner, [donor]))[1] == Position(8, b"now"), "the copy lives longer than what it is of"


async def test_what_is_not_kept_is_refused(autojump_clock: MockClock) -> None:
    async with peers(2) as (_, [(donor, rpc), (_, joiner)]):
        giver(rpc)
        with pytest.raises(Refused, match="not kept"):
            await fetch(joiner, [donor], of=91)
        with pytest.raises(Refused, match="no state of its own"):
            await SnapshotFetcher(joiner).fetch([donor], StateRequest(RUN, 1), TOTAL, WORKER)


async def test_only_so_many_are_held_for_others(autojump_clock: MockClock) -> None:
    async with peers(2 + STATE_NAMED_COPIES) as (_, [(donor, rpc), *callers]):
        giver(rpc)

        async def ask(step: int, caller: Rpc) -> None:
            body = StateRequest(RUN, 1, of=at(step))
            await caller.call(donor, "state/1/manifest", body, StateManifest, timeout_s=5)

        for step, (_, caller) in enumerate(callers[:-1]):
            await ask(step, caller)
        with pytest.raises(Overloaded):
            await ask(50, callers[-1][1])
        await ask(0, callers[-1][1])  # one that is there
        await ask(51, callers[1][1])  # in place of its own


async def test_a_fetch_that_needs_a_file_lies_in_one_or_fails(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with peers(2) as (_, [(donor, rpc), (_, joiner)]):
        giver(rpc)
        fetcher, request = SnapshotFetcher(joiner), StateRequest(RUN, 1, of=at(7))
        fetcher.folder, fetcher.needs_file = tmp_path / "missing", True
        with pytest.raises(NoMemory, match=r"no space for a state of 2\.4 MB: .*missing: No such file or directory"):
            await fetcher.fetch([donor], request, TOTAL, WORKER)
        fetcher.folder = tmp_path
        position, (item,), room = await fetcher.fetch([donor], request, TOTAL, WORKER)
    assert position == at(8)
    assert bytes(item.payload) == bytes(total(1)[0].payload)
    assert room._is_file
