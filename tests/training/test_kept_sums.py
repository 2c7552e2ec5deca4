"""Sums that a member keeps for later orders: it brings them, gets copies of others', and never keeps many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from peerd.core.messages.swarm import Mbs, Prepare
from peerd.core.run.runfile import AveragingSection, RunFile
from peerd.machine.averaging.allreduce import RoundFailed
from peerd.service.averaging.allreduce import Averaging, Vector
from peerd.service.run_services import Carries
from peerd.training.stage.averaging import Rounds
from tests.service.averaging.test_allreduce import Node, group
from tests.worlds.machines.workers import InlineWorker

LENGTH = 5000


@dataclass
class Services:
    """The part of a run's services that `Rounds` uses."""

    averaging: Averaging

    def carries(self) -> Carries:
        return Carries(0.0, 0.0, True, True, True)


class Members:
    """Nodes that sum as they are ordered."""

    def __init__(self, nodes: list[Node], code: Any) -> None:
        run = RunFile(run="kept", averaging=AveragingSection(code=code, part_bytes=1024))
        self.nodes = nodes
        self.rounds = [Rounds(run, cast("Any", Services(n.averaging)), InlineWorker(), n.id) for n in nodes]

    def order(self, attempt: bytes, members: tuple[int, ...], **more: Any) -> Prepare:
        names = [self.nodes[i].id.text for i in members]
        return Prepare(bytes(16), 1, 0, attempt, b"", names, Mbs(), 8, 60.0, **more)

    async def sum(self, i: int, order: Prepare, own: Vector | None = None) -> Vector:
        rounds = self.rounds[i]
        assert rounds.brings_gradient(order) == (own is not None)
        found = await rounds.total(order, rounds.plan(order, self.nodes[i].id), own)
        return found.vector


def gradient(i: int) -> Vector:
    return np.random.default_rng(i).standard_normal(LENGTH).astype("float32")


@pytest.mark.parametrize("code", ["none", "int8"])
async def test_a_member_that_was_left_gets_the_same_bits_and_keeps_two_sums_at_most(
    autojump_clock: MockClock, code: str
) -> None:
    async with group(3) as (_, nodes):
        members, sums = Members(nodes, code), dict[int, Vector]()
        first = members.order(b"f" * 16, (0, 1), last=False)

        async def one(i: int, order: Prepare, own: Vector | None = None) -> None:
            sums[i] = await members.sum(i, order, own)

        async with trio.open_nursery() as nursery:
            for i in (0, 1):
                nursery.start_soon(one, i, first, gradient(i))
        assert sums[0].tobytes() == sums[1].tobytes()
        await members.sum(2, members.order(b"g" * 16, (2,), last=False), gradient(2))
        for number in range(5):
            attempt, listeners = bytes([number]) * 16, [nodes[2].id.text]
            async with trio.open_nursery() as nursery:
                order = members.order(attempt, (1, 2), listeners=listeners, brings=b"f" * 16, last=bool(number))
                nursery.start_soon(one, 1, order)
                nursery.start_soon(one, 2, members.order(attempt, (1, 2), listeners=listeners, last=bool(number)))
            assert sums[0].tobytes() == sums[1].tobytes() == sums[2].tobytes()
            assert all(len(rounds._kept) <= 2 for rounds in members.rounds)


async def test_a_sum_that_is_not_kept_cannot_be_brought(autojump_clock: MockClock) -> None:
    async with group(1) as (_, nodes):
        members = Members(nodes, "none")
        await members.sum(0, members.order(b"f" * 16, (0,), last=False), gradient(0))
        again = await members.sum(0, members.order(b"g" * 16, (0,), brings=b"f" * 16))
        assert again.tobytes() == gradient(0).tobytes()
        with pytest.raises(RoundFailed, match="not here"):
            await members.sum(0, members.order(b"h" * 16, (0,), brings=b"x" * 16))
        members.rounds[0].drop_sums()
        with pytest.raises(RoundFailed, match="not here"):
            await members.sum(0, members.order(b"i" * 16, (0,), brings=b"g" * 16))
