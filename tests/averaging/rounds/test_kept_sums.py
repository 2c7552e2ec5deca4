"""Sums that a member keeps for later orders: it brings them, gets copies of others', and never keeps many."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from peerd.averaging.allreduce import AllReduceService, Vector
from peerd.averaging.line_speeds import LineSpeeds
from peerd.averaging.rounds.averaging_rounds import AveragingRounds, SumAbsent, Total
from peerd.messages.swarm import Mbs, Prepare
from peerd.run.runfile import AveragingSection, RunFile
from tests.averaging.test_allreduce import Node, group
from tests.worlds.machines.workers import InlineWorker

LENGTH = 5000


@dataclass
class Services:
    """The part of a run's services that `AveragingRounds` uses."""

    averaging: AllReduceService

    def line_speeds(self) -> LineSpeeds:
        return LineSpeeds(0.0, 0.0, True, True, True)


class Members:
    """Nodes that sum as they are ordered."""

    def __init__(self, nodes: list[Node], code: Any, folder: Path | None = None) -> None:
        run = RunFile(run="kept", averaging=AveragingSection(code=code, part_bytes=1024))
        self.nodes = nodes
        self.rounds = [
            AveragingRounds(run, cast("Any", Services(n.averaging)), InlineWorker(), n.id, folder) for n in nodes
        ]

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
        with pytest.raises(SumAbsent, match="does not have the sum"):
            await members.sum(0, members.order(b"h" * 16, (0,), brings=b"x" * 16))
        members.rounds[0].drop_sums()
        with pytest.raises(SumAbsent, match="does not have the sum"):
            await members.sum(0, members.order(b"i" * 16, (0,), brings=b"g" * 16))


async def together(members: Members, orders: dict[int, Prepare], own: dict[int, Vector]) -> dict[int, Total]:
    """What each of these members has at the end of one round."""
    found: dict[int, Total] = {}

    async def one(i: int, order: Prepare) -> None:
        rounds = members.rounds[i]
        found[i] = await rounds.total(order, rounds.plan(order, members.nodes[i].id), own.get(i))

    async with trio.open_nursery() as nursery:
        for i, order in orders.items():
            nursery.start_soon(one, i, order)
    return found


def missed_of(rounds: AveragingRounds) -> list[Vector]:
    """What the rounds missed that led to the newest sum."""
    return [one.whole().copy() for one in next(reversed(rounds._kept.values())).missed]


async def test_a_sum_that_is_brought_on_and_on_keeps_no_more_vectors(autojump_clock: MockClock) -> None:
    async with group(2) as (_, nodes):
        members = Members(nodes, "int8")
        first = members.order(bytes(16), (0, 1), last=False)
        await together(members, {0: first, 1: first}, {0: gradient(0), 1: gradient(1)})
        for number in range(1, 6):
            before = [sum(missed_of(rounds)) for rounds in members.rounds]
            order = members.order(bytes([number]) * 16, (0, 1), last=False, brings=bytes([number - 1]) * 16)
            await together(members, {0: order, 1: order}, {})
            for rounds, known in zip(members.rounds, before, strict=True):
                assert len(missed_of(rounds)) == 2
                assert missed_of(rounds)[0].tobytes() == np.asarray(known).tobytes(), "nothing of it is lost"


async def test_a_round_that_is_repeated_leaves_its_errors_once_with_a_listener_that_sums(
    autojump_clock: MockClock,
) -> None:
    async with group(3) as (_, nodes):
        members = Members(nodes, "int8")
        first, alone = members.order(b"A" * 16, (0, 2), last=False), members.order(b"B" * 16, (1,), last=False)
        own = {i: gradient(i) for i in range(3)}
        await together(members, {0: first, 2: first, 1: alone}, own)
        known = missed_of(members.rounds[2])[0]
        found = []
        for number in range(3):
            more = {"listeners": [nodes[2].id.text], "last": True}
            brings = {0: b"A" * 16, 1: b"B" * 16, 2: b"A" * 16}
            orders = {i: members.order(bytes([number]) * 16, (0, 1, 2), brings=brings[i], **more) for i in range(3)}
            totals = await together(members, orders, {})
            found.append(missed_of(members.rounds[2]))
        for one, further in found:
            assert one.tobytes() == known.tobytes()
            assert further.any(), "it sums a share"
            assert further.tobytes() == found[0][1].tobytes()
        totals[2].settle()
        residual = cast("Any", members.rounds[2]._feedback).residual
        assert residual.tobytes() == (known + found[0][1]).tobytes()


async def test_a_listener_that_brought_nothing_keeps_its_residual_for_the_next_step(autojump_clock: MockClock) -> None:
    async with group(3) as (_, nodes):
        members = Members(nodes, "int8")
        order = members.order(b"A" * 16, (0, 1, 2))
        totals = await together(members, dict.fromkeys(range(3), order), {i: gradient(i) for i in range(3)})
        for total in totals.values():
            total.settle()
        feedback = cast("Any", members.rounds[2]._feedback)
        before = feedback.residual.copy()
        own = {0: gradient(0), 1: gradient(1)}
        firsts = {i: members.order(bytes([66 + i]) * 16, (i,), last=False) for i in (0, 1)}
        await together(members, firsts, own)
        more = {"listeners": [nodes[2].id.text]}
        orders = {i: members.order(b"J" * 16, (0, 1, 2), brings=bytes([66 + i]) * 16, **more) for i in (0, 1)}
        totals = await together(members, orders | {2: members.order(b"J" * 16, (0, 1, 2), **more)}, {})
        (further,) = missed_of(members.rounds[2])
        totals[2].settle()
        assert feedback.residual.tobytes() == (before + further).tobytes()


async def test_a_sum_that_was_called_off_is_not_what_a_listener_goes_on_with(autojump_clock: MockClock) -> None:
    async with group(2) as (_, nodes):
        members = Members(nodes, "none")
        await members.sum(0, members.order(b"A" * 16, (0,), last=False), gradient(0))
        await members.sum(0, members.order(b"x" * 16, (0,), brings=b"A" * 16))  # the conductor calls it off
        await members.sum(1, members.order(b"B" * 16, (1,), last=False), gradient(1))
        more = {"listeners": [nodes[0].id.text], "last": False}
        orders = {
            0: members.order(b"C" * 16, (1, 0), brings=b"A" * 16, **more),
            1: members.order(b"C" * 16, (1, 0), brings=b"B" * 16, **more),
        }
        await together(members, orders, {})
        assert [*members.rounds[0]._kept] == [b"A" * 16, b"C" * 16]
        assert members.rounds[0].keeps(b"A" * 16)


async def test_a_group_of_one_makes_no_copy_of_its_sum(autojump_clock: MockClock) -> None:
    async with group(1) as (_, nodes):
        members, own = Members(nodes, "none"), gradient(0)
        assert await members.sum(0, members.order(b"A" * 16, (0,), last=False), own) is own
        assert await members.sum(0, members.order(b"B" * 16, (0,), brings=b"A" * 16)) is own
        plan = members.rounds[0].plan(members.order(b"C" * 16, (0,)), nodes[0].id)
        assert await nodes[0].averaging.sum(plan, own, InlineWorker()) is own


async def test_a_large_residual_lies_in_a_file_until_rounds_are_seen_to_be_short(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peerd.state.catchup.copy_room.WORTH_A_FILE_BYTES", 4 * LENGTH)
    async with group(2) as (_, nodes):
        plain, filed = Members(nodes, "int8"), Members(nodes, "int8", tmp_path)
        for number in range(3):
            sums = []
            for members in (plain, filed):
                order = members.order(bytes([number, members is filed]) * 8, (0, 1))
                totals = await together(members, dict.fromkeys(range(2), order), {i: gradient(i) for i in range(2)})
                for total in totals.values():
                    total.settle()
                sums.append([total.vector.tobytes() for total in totals.values()])
            assert sums[0] == sums[1]
            residuals = [cast("Any", rounds._feedback)._residual for rounds in filed.rounds]
            assert [residual.in_pages for residual in residuals] == [number == 0] * 2


async def test_a_disk_that_cannot_take_residuals_costs_memory_and_one_warning_not_the_round(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("peerd.state.catchup.copy_room.WORTH_A_FILE_BYTES", 4 * LENGTH)
    monkeypatch.setattr("peerd.state.catchup.copy_room._WORTH_WRITING_S", 0.0)  # however short rounds are
    async with group(2) as (_, nodes):
        members = Members(nodes, "int8", tmp_path / "missing")
        for number in range(3):
            order = members.order(bytes([number]) * 16, (0, 1))
            totals = await together(members, dict.fromkeys(range(2), order), {i: gradient(i) for i in range(2)})
            for total in totals.values():
                total.settle()
    warnings = [record for record in caplog.records if "stays in memory" in record.getMessage()]
    assert [record.levelname for record in warnings if record.levelname == "WARNING"] == ["WARNING"] * 2, "one a member"
