"""State transfer: whole and checked, or an error; a donor that lies or dies is replaced by the next."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from peerd.core.errors import ProtocolViolation, Refused, RemoteError
from peerd.core.ids import PeerId
from peerd.core.training import Position, StateRequest
from peerd.service.rpc import Rpc
from peerd.service.snapshot import PIECE_BYTES, Snapshots, StateItem
from tests.kit.fakehost import FakeNet, TrioClock, fake_net
from tests.kit.workers import InlineWorker

RUN = b"r" * 16


def state(value: int, sizes: tuple[int, ...] = (PIECE_BYTES * 2 + 100, 0, 12)) -> list[StateItem]:
    items = []
    for i, size in enumerate(sizes):
        data = np.full(size, value + i, dtype="uint8")
        items.append(StateItem(f"t{i}", "uint8", (size,), data.data))
    return items


class Donor(Snapshots):
    """Gives the state of a step."""

    def __init__(self, rpc: Rpc, step: int) -> None:
        super().__init__(rpc)
        self.step = step
        self.offer(RUN, 1, self.freeze, InlineWorker())

    async def freeze(self) -> tuple[Position, list[StateItem]]:
        await trio.lowlevel.checkpoint()
        return Position(self.step, b"x"), state(self.step)


@asynccontextmanager
async def peers(count: int) -> AsyncIterator[tuple[FakeNet, list[tuple[PeerId, Rpc]]]]:
    async with fake_net() as net, trio.open_nursery() as nursery:
        made = []
        for i in range(count):
            host = net.host(f"peer {i}")
            rpc = Rpc(host, TrioClock())
            await nursery.start(rpc.run)
            made.append((host.id, rpc))
        yield net, made
        nursery.cancel_scope.cancel()


async def fetch(rpc: Rpc, donors: list[PeerId], stage: int = 1) -> tuple[Position, list[bytes]]:
    rpc.unserve("state/1")  # a second receiver on the same peer
    position, items = await Snapshots(rpc).fetch(donors, StateRequest(RUN, stage), state(0), InlineWorker())
    return position, [bytes(item.payload) for item in items]


async def test_a_joiner_gets_the_whole_state(autojump_clock: MockClock) -> None:
    async with peers(2) as (_, [(donor, rpc), (_, joiner)]):
        Donor(rpc, 7)
        position, data = await fetch(joiner, [donor])
        assert position == Position(7, b"x")
        assert data == [bytes(item.payload) for item in state(7)]


async def test_two_joiners_share_one_frozen_copy(autojump_clock: MockClock) -> None:
    async with peers(3) as (_, [(donor, rpc), (_, a), (_, b)]):
        giver = Donor(rpc, 7)
        assert await fetch(a, [donor]) == await fetch(b, [donor])
        assert giver._offer is not None
        assert len(giver._offer.copies) == 1


async def test_an_unreachable_donor_is_replaced_by_the_next(autojump_clock: MockClock) -> None:
    async with peers(3) as (net, [(dead, _), (donor, rpc), (own, joiner)]):
        Donor(rpc, 3)
        net.cut(dead, own)
        assert (await fetch(joiner, [dead, donor]))[0].step == 3


async def test_wrong_bytes_are_noticed_and_the_donor_is_named(autojump_clock: MockClock) -> None:
    async with peers(2) as (_, [(donor, rpc), (_, joiner)]):
        giver = Donor(rpc, 7)
        await fetch(joiner, [donor])
        assert giver._offer is not None
        (copy,) = giver._offer.copies.values()
        copy.items[0].payload[5] = 254
        with pytest.raises(ProtocolViolation, match="digest") as caught:
            await fetch(joiner, [donor])
        assert caught.value.peer == donor


async def test_another_stage_is_refused(autojump_clock: MockClock) -> None:
    async with peers(2) as (_, [(donor, rpc), (_, joiner)]):
        Donor(rpc, 7)
        with pytest.raises(Refused):
            await fetch(joiner, [donor], stage=0)


async def test_a_state_of_another_shape_is_refused_before_it_is_fetched(autojump_clock: MockClock) -> None:
    async with peers(2) as (_, [(donor, rpc), (_, joiner)]):
        Donor(rpc, 7)
        expected = state(0, (4, 4))
        with pytest.raises(ProtocolViolation, match="does not fit"):
            await Snapshots(joiner).fetch([donor], StateRequest(RUN, 1), expected, InlineWorker())


async def test_without_donors_there_is_an_error(autojump_clock: MockClock) -> None:
    async with peers(1) as (_, [(_, joiner)]):
        with pytest.raises(RemoteError):
            await fetch(joiner, [])
