"""State transfer: whole, vouched for and checked, or an error; donors that lie or die are replaced by the others."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from peerd.core.errors import Overloaded, ProtocolViolation, Refused, RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import STATE_COPIES, STATE_PIECE_BYTES
from peerd.core.signals import Signal
from peerd.messages.encoding import Empty
from peerd.messages.state import StateDigests, StateManifest, StatePiece, StateRequest, TensorSpec
from peerd.messages.swarm import Position
from peerd.rpc.rpc import Answer, Incoming, Rpc
from peerd.state.snapshot import Donors, Snapshots, StateItem
from peerd.state.state_server import StateServer
from tests.worlds.machines.fakehost import FakeNet, TrioClock, fake_net
from tests.worlds.machines.still import Still
from tests.worlds.machines.workers import InlineWorker

RUN = b"r" * 16
SIZES = (STATE_PIECE_BYTES * 2 + 100, 0, 12)
LARGE = (STATE_PIECE_BYTES * 14, 7, 64, STATE_PIECE_BYTES * 9 + 1)
PIECES = 24  # of LARGE


@functools.cache
def state(value: int, sizes: tuple[int, ...] = SIZES) -> list[StateItem]:
    rng = np.random.default_rng(value)
    data = [np.frombuffer(rng.bytes(size), dtype="uint8") for size in sizes]
    return [StateItem(f"t{i}", "uint8", (len(d),), d.data) for i, d in enumerate(data)]


def outline(sizes: tuple[int, ...] = SIZES) -> list[TensorSpec]:
    return [TensorSpec(f"t{i}", "uint8", (size,)) for i, size in enumerate(sizes)]


class Donor(Snapshots):
    """Gives the state of a step; counts what it is asked for. `before` is awaited before each piece."""

    def __init__(self, rpc: Rpc, step: int, sizes: tuple[int, ...] = SIZES, items: list[StateItem] | None = None):
        super().__init__(rpc)
        self.step = step
        self.freezes = 0
        self.pieces: list[int] = []
        self.lies_from = 1 << 30
        self.stops_at = 1 << 30
        self.stopped = trio.Event()
        self.go_on = trio.Event()
        self.piece_s = 0.01
        self.stepped = Signal()
        self._items = items or state(step, sizes)
        self.rpc.unserve("state/1")
        self.giving = Counting(self)
        self.give()

    def give(self) -> None:
        self.giving.offer(RUN, 1, self.freeze, InlineWorker(), lambda: Position(self.step, b"x"), self.reached)

    def move(self) -> None:
        """Make a step."""
        self.step, self._items = self.step + 1, state(self.step + 1)
        self.stepped.notify()

    async def reached(self, step: int) -> None:
        while self.step < step:
            await self.stepped.wait()

    async def freeze(self) -> tuple[Position, Still]:
        await trio.lowlevel.checkpoint()
        self.freezes += 1
        return Position(self.step, b"x"), Still(self._items)


class Counting(StateServer):
    """The donor's side, with what a test wants to see and to spoil."""

    def __init__(self, donor: Donor) -> None:
        self._donor = donor
        super().__init__(donor.rpc)

    async def _give_piece(self, call: Incoming[StatePiece]) -> Answer[Empty]:
        donor = self._donor
        donor.pieces.append(call.body.piece)
        nth = len(donor.pieces)
        await trio.sleep(donor.piece_s)
        if nth > donor.stops_at:
            donor.stopped.set()
            await donor.go_on.wait()
        answer = await super()._give_piece(call)
        if nth > donor.lies_from:
            (frame,) = answer.frames
            spoilt = bytearray(frame.payload)
            spoilt[-1] ^= 1
            return Answer(Empty(), (replace(frame, payload=spoilt),))
        return answer


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


async def fetch(
    rpc: Rpc | Snapshots, donors: Donors, stage: int = 1, sizes: tuple[int, ...] = SIZES
) -> tuple[Position, list[bytes]]:
    if isinstance(rpc, Rpc):
        rpc.unserve("state/1")  # a second receiver on the same peer
        rpc = Snapshots(rpc)
    position, items, _ = await rpc.fetch(donors, StateRequest(RUN, stage), outline(sizes), InlineWorker())
    return position, [bytes(item.payload) for item in items]


def values(items: list[StateItem]) -> list[bytes]:
    return [bytes(item.payload) for item in items]


async def test_a_joiner_gets_the_whole_state(autojump_clock: MockClock) -> None:
    async with peers(2) as (_, [(donor, rpc), (_, joiner)]):
        Donor(rpc, 7)
        position, data = await fetch(joiner, [donor])
        assert position == Position(7, b"x")
        assert data == values(state(7))


async def test_what_comes_is_aligned_and_can_be_written(autojump_clock: MockClock) -> None:
    async with peers(2) as (_, [(donor, rpc), (_, joiner)]):
        Donor(rpc, 7, LARGE)
        _, items, _ = await Snapshots(joiner).fetch([donor], StateRequest(RUN, 1), outline(LARGE), InlineWorker())
        for item in items:
            assert not item.payload.readonly
            assert np.frombuffer(item.payload, dtype="uint8").ctypes.data % 64 == 0


async def test_two_joiners_share_one_frozen_copy_of_each_position(autojump_clock: MockClock) -> None:
    async with peers(3) as (_, [(donor, rpc), (_, a), (_, b)]):
        giver = Donor(rpc, 7)
        assert await fetch(a, [donor]) == await fetch(b, [donor])
        assert giver.giving.copies == [Position(7, b"x")]
        assert giver.freezes == 1
        giver.step, giver._items = 8, state(8)
        assert (await fetch(b, [donor]))[0].step == 8
        assert giver.freezes == 2


async def test_an_unreachable_donor_is_replaced_by_another(autojump_clock: MockClock) -> None:
    async with peers(3) as (net, [(dead, _), (donor, rpc), (own, joiner)]):
        Donor(rpc, 3)
        net.cut(dead, own)
        assert (await fetch(joiner, [dead, donor]))[0].step == 3


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "hangs"])
async def test_one_is_killed_and_one_lies_and_the_rest_is_fetched_from_the_third(
    autojump_clock: MockClock, is_killed: bool
) -> None:
    async with peers(4) as (net, [(a, rpc_a), (b, rpc_b), (c, rpc_c), (own, rpc)]):
        good, lost, liar = Donor(rpc_a, 5, LARGE), Donor(rpc_b, 5, LARGE), Donor(rpc_c, 5, LARGE)
        lost.stops_at, liar.lies_from = 3, 3
        joiner = Snapshots(rpc)
        notes: list[str] = []
        joiner.notes = notes.append
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def kill() -> None:
                await lost.stopped.wait()
                if is_killed:
                    net.cut(b, own)

            position, data = await fetch(joiner, [a, b, c], sizes=LARGE)
        assert position.step == 5
        assert data == values(state(5, LARGE))
        report = joiner.report
        assert report is not None
        assert report.liars == [c.text]
        assert sum(c.text[-6:] in note and "wrong digest" in note for note in notes) == 1
        assert report.by_donor[b.text] >= 1
        assert report.asked <= report.pieces + 3 * 8
        assert sum(report.by_donor.values()) <= report.pieces + 8
        assert len(good.pieces) == len(set(good.pieces))


async def test_a_second_attempt_goes_on_where_the_first_ended(autojump_clock: MockClock) -> None:
    async with peers(3) as (net, [(a, rpc_a), (b, rpc_b), (own, rpc)]):
        first, second = Donor(rpc_a, 5, LARGE), Donor(rpc_b, 5, LARGE)
        joiner = Snapshots(rpc)
        first.stops_at = 16
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def kill() -> None:
                await first.stopped.wait()
                net.cut(a, own)

            with pytest.raises(RemoteError):
                await fetch(joiner, [a], sizes=LARGE)
        under_way = 8
        there = len(first.pieces) - under_way
        assert there >= 8
        assert (await fetch(joiner, [b], sizes=LARGE))[1] == values(state(5, LARGE))
        assert joiner.report is not None
        assert joiner.report.had >= there
        assert len(second.pieces) == joiner.report.pieces - joiner.report.had
        assert not set(second.pieces) & set(first.pieces[: -2 * under_way])


@asynccontextmanager
async def begun_download() -> AsyncIterator[tuple[PeerId, Donor, Snapshots]]:
    """A donor's id, the donor, and a joiner that has some of its pieces."""
    async with peers(2) as (_, [(donor, rpc), (_, other)]):
        giver, joiner = Donor(rpc, 5, LARGE), Snapshots(other)
        with trio.move_on_after(0.025):
            await fetch(joiner, [donor], sizes=LARGE)
        yield donor, giver, joiner


async def test_a_cancelled_download_goes_on_later(autojump_clock: MockClock) -> None:
    async with begun_download() as (donor, giver, joiner):
        before = len(giver.pieces)
        assert 8 < before < PIECES
        assert (await fetch(joiner, [donor], sizes=LARGE))[1] == values(state(5, LARGE))
        assert len(giver.pieces) <= PIECES + 8


async def test_a_donor_that_turns_up_late_is_asked_too(autojump_clock: MockClock) -> None:
    async with peers(3) as (_, [(a, rpc_a), (b, rpc_b), (_, joiner)]):
        slow, quick = Donor(rpc_a, 5, LARGE), Donor(rpc_b, 5, LARGE)
        slow.piece_s = 4.0
        known = [a]
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def turn_up() -> None:
                await trio.sleep(5)
                known.append(b)

            assert (await fetch(joiner, lambda: known, sizes=LARGE))[1] == values(state(5, LARGE))
        assert len(quick.pieces) > PIECES / 2


async def test_wrong_bytes_are_noticed_and_the_donor_is_named_and_shunned(autojump_clock: MockClock) -> None:
    async with peers(2) as (_, [(donor, rpc), (_, joiner)]):
        giver = Donor(rpc, 7)
        giver.lies_from = 0
        receiver = Snapshots(joiner)
        with pytest.raises(ProtocolViolation, match="digest") as caught:
            await fetch(receiver, [donor])
        assert caught.value.peer == donor
        asked = len(giver.pieces)
        with pytest.raises(RemoteError, match="no donor"):
            await fetch(receiver, [donor])
        assert len(giver.pieces) == asked
        await trio.sleep(601)
        giver.lies_from = 1 << 30
        await fetch(receiver, [donor])


async def test_a_donor_with_another_state_is_outvoted(autojump_clock: MockClock) -> None:
    async with peers(4) as (_, [(a, rpc_a), (b, rpc_b), (c, rpc_c), (_, joiner)]):
        Donor(rpc_a, 7)
        Donor(rpc_b, 7)
        other = Donor(rpc_c, 7, items=state(99))
        assert (await fetch(joiner, [c, a, b]))[1] == values(state(7))
        assert not other.pieces


async def test_two_donors_that_contradict_each_other_give_nothing(autojump_clock: MockClock) -> None:
    async with peers(3) as (_, [(a, rpc_a), (b, rpc_b), (_, joiner)]):
        Donor(rpc_a, 7)
        Donor(rpc_b, 7, items=state(99))
        with pytest.raises(RemoteError, match="agree"):
            await fetch(joiner, [a, b])


async def test_digests_that_do_not_make_up_the_root_are_a_lie(autojump_clock: MockClock) -> None:
    class Liar(StateServer):
        async def _give_manifest(self, call: Incoming[StateRequest]) -> Answer[StateManifest]:
            answer = await super()._give_manifest(call)
            manifest = StateManifest(answer.body.position, answer.body.layout, b"?" * 32)
            copies = self._offers[1].frozen.copies
            copies[manifest.root] = next(iter(copies.values()))
            return Answer(manifest)

    async with peers(2) as (_, [(donor, rpc), (_, joiner)]):
        giver = Liar(rpc)
        giver.offer(RUN, 1, lambda: freeze_of(7), InlineWorker(), lambda: Position(7, b"x"), no_step)
        with pytest.raises(ProtocolViolation, match="digests"):
            await fetch(joiner, [donor])


async def no_step(step: int) -> None:
    """`reached` of a donor that is not asked to wait."""
    raise AssertionError(step)


async def freeze_of(step: int) -> tuple[Position, Still]:
    await trio.lowlevel.checkpoint()
    return Position(step, b"x"), Still(state(step))


async def test_another_stage_is_refused(autojump_clock: MockClock) -> None:
    async with peers(2) as (_, [(donor, rpc), (_, joiner)]):
        Donor(rpc, 7)
        with pytest.raises(Refused):
            await fetch(joiner, [donor], stage=0)


async def test_a_state_of_another_shape_is_refused_before_it_is_fetched(autojump_clock: MockClock) -> None:
    async with peers(2) as (_, [(donor, rpc), (_, joiner)]):
        giver = Donor(rpc, 7)
        with pytest.raises(ProtocolViolation, match="does not fit"):
            await fetch(joiner, [donor], sizes=(4, 4))
        assert not giver.pieces


async def test_without_donors_there_is_an_error(autojump_clock: MockClock) -> None:
    async with peers(1) as (_, [(_, joiner)]):
        with pytest.raises(RemoteError):
            await fetch(joiner, [])


async def test_an_empty_state_is_one_too(autojump_clock: MockClock) -> None:
    async with peers(2) as (_, [(donor, rpc), (_, joiner)]):
        Donor(rpc, 7, (0,))
        assert (await fetch(joiner, [donor], sizes=(0,)))[1] == [b""]


# --- a donor's limits -------------------------------------------------------------------------------------------


async def test_pieces_that_do_not_exist_are_refused(autojump_clock: MockClock) -> None:
    async with peers(2) as (_, [(donor, rpc), (_, caller)]):
        Donor(rpc, 7)
        manifest = await caller.call(donor, "state/1/manifest", StateRequest(RUN, 1), StateManifest, timeout_s=5)
        for body in (StatePiece(RUN, manifest.body.root, 3), StatePiece(RUN, b"?" * 32, 0)):
            with pytest.raises(Refused):
                await caller.call(donor, "state/1/piece", body, Empty, timeout_s=5)


async def test_a_copy_in_use_is_not_let_go_for_a_new_one(autojump_clock: MockClock) -> None:
    async with peers(2 + STATE_COPIES) as (_, [(donor, rpc), *callers]):
        giver = Donor(rpc, 0)

        async def ask(step: int, caller: Rpc) -> bytes:
            giver.step = step
            body = StateRequest(RUN, 1)
            answer = await caller.call(donor, "state/1/manifest", body, StateManifest, timeout_s=5)
            return answer.body.root

        (_, first), *_, (_, last) = callers
        roots = [await ask(step, caller) for step, (_, caller) in enumerate(callers[:-1])]
        with pytest.raises(Overloaded):
            await ask(STATE_COPIES, last)
        await trio.sleep(40)
        await first.call(donor, "state/1/piece", StatePiece(RUN, roots[0], 0), Empty, timeout_s=5)
        await ask(STATE_COPIES, last)  # in place of the one that nobody uses
        assert giver.giving.copies == [Position(0, b"x"), Position(STATE_COPIES, b"x")]


async def test_who_only_asks_now_and_then_keeps_no_copy_from_others(autojump_clock: MockClock) -> None:
    """A cheap call each half minute, of the manifest, the digests, or the same piece again, is no download."""
    async with peers(2 + STATE_COPIES) as (_, [(donor, rpc), *callers]):
        giver = Donor(rpc, 0, LARGE, state(0, LARGE))
        honest = callers[-1][1]
        request = StateRequest(RUN, 1)
        roots = []
        for giver.step, (_, holder) in enumerate(callers[:-1]):
            answer = await holder.call(donor, "state/1/manifest", request, StateManifest, timeout_s=5)
            roots.append(answer.body.root)
        giver.step += 1
        for _ in range(3):
            with pytest.raises(Overloaded):
                await honest.call(donor, "state/1/manifest", request, StateManifest, timeout_s=5)
            for (_, holder), root in zip(callers[:-1], roots, strict=True):
                await holder.call(donor, "state/1/digests", StateDigests(RUN, root), Empty, timeout_s=5)
                await holder.call(donor, "state/1/piece", StatePiece(RUN, root, 0), Empty, timeout_s=5)
            await trio.sleep(30)
        await trio.sleep(34)
        for (_, holder), root in zip(callers[:-1], roots, strict=True):
            await holder.call(donor, "state/1/piece", StatePiece(RUN, root, 0), Empty, timeout_s=5)
        answer = await honest.call(donor, "state/1/manifest", request, StateManifest, timeout_s=5)
        assert answer.body.position == Position(giver.step, b"x")


async def test_who_gets_on_slowly_keeps_its_copy(autojump_clock: MockClock) -> None:
    async with peers(2 + STATE_COPIES) as (_, [(donor, rpc), *callers]):
        giver = Donor(rpc, 0, LARGE, state(0, LARGE))
        request = StateRequest(RUN, 1)
        roots = []
        for giver.step, (_, holder) in enumerate(callers[:-1]):
            answer = await holder.call(donor, "state/1/manifest", request, StateManifest, timeout_s=5)
            roots.append(answer.body.root)
        giver.step += 1
        for piece in range(PIECES):
            for (_, holder), root in zip(callers[:-1], roots, strict=True):
                await holder.call(donor, "state/1/piece", StatePiece(RUN, root, piece), Empty, timeout_s=5)
            with pytest.raises(Overloaded):
                await callers[-1][1].call(donor, "state/1/manifest", request, StateManifest, timeout_s=5)
            await trio.sleep(30)


async def test_no_strangers_keep_a_member_from_a_copy(autojump_clock: MockClock) -> None:
    async with peers(3 + STATE_COPIES) as (_, [(donor, rpc), *callers]):
        giver = Donor(rpc, 0)
        *strangers, (member, honest), (_, other) = callers
        giver.giving.is_member = lambda peer: peer == member
        request = StateRequest(RUN, 1)
        for giver.step, (_, stranger) in enumerate(strangers):
            await stranger.call(donor, "state/1/manifest", request, StateManifest, timeout_s=5)
        giver.step += 1
        with pytest.raises(Overloaded):
            await other.call(donor, "state/1/manifest", request, StateManifest, timeout_s=5)
        answer = await honest.call(donor, "state/1/manifest", request, StateManifest, timeout_s=5)
        assert answer.body.position == Position(giver.step, b"x")


async def test_who_has_fetched_a_state_does_not_keep_the_next_from_a_newer_one(autojump_clock: MockClock) -> None:
    async with peers(3 + STATE_COPIES) as (_, [(donor, rpc), *joiners]):
        giver = Donor(rpc, 0)
        begun = trio.current_time()
        for _, joiner in joiners:
            assert await fetch(joiner, [donor]) == (Position(giver.step, b"x"), values(state(giver.step)))
            giver.move()
        assert trio.current_time() - begun < 3


async def test_a_copy_that_nobody_has_asked_for_in_a_while_is_let_go(autojump_clock: MockClock) -> None:
    async with peers(2) as (_, [(donor, rpc), (_, joiner)]):
        giver = Donor(rpc, 7)
        giver.giving.let_go()
        await fetch(joiner, [donor])
        await trio.sleep(299)
        giver.giving.let_go()
        assert giver.giving.copies == [Position(7, b"x")]
        await trio.sleep(2)
        giver.giving.let_go()
        assert giver.giving.copies == []


async def test_who_asks_again_lets_go_of_the_copy_it_asked_for_before(autojump_clock: MockClock) -> None:
    async with peers(2) as (_, [(donor, rpc), (_, caller)]):
        giver = Donor(rpc, 0)
        for giver.step in range(5):
            await caller.call(donor, "state/1/manifest", StateRequest(RUN, 1), StateManifest, timeout_s=5)
        assert giver.giving.copies == [Position(3, b"x"), Position(4, b"x")]


async def test_notes_say_how_it_goes(autojump_clock: MockClock) -> None:
    async with peers(2) as (_, [(donor, rpc), (_, other)]):
        Donor(rpc, 5, LARGE).piece_s = 4.0
        joiner, notes = Snapshots(other), list[str]()
        joiner.notes = notes.append
        await fetch(joiner, [donor], sizes=LARGE)
        first, *middle, last = notes
        assert first.startswith("fetching the state of step 5, 24.1 MB")
        assert middle[0].endswith("% of 24.1 MB of step 5, from 1 donors")
        shares = [int(note.split("%")[0]) for note in middle]
        assert shares == sorted(shares)
        assert 0 < shares[0] < shares[-1] < 100
        assert "24.1 MB of step 5" in last


@pytest.mark.slow
async def test_a_newer_state_begins_anew_and_what_was_kept_of_the_other_is_let_go(autojump_clock: MockClock) -> None:
    async with begun_download() as (donor, giver, joiner):
        kept = weakref.ref(joiner._begun)
        assert kept() is not None
        giver.step, giver._items, giver.stops_at = 6, state(6, LARGE), 0
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def begin_anew() -> None:
                assert await fetch(joiner, [donor], 1, LARGE) == (Position(6, b"x"), values(state(6, LARGE)))

            await giver.stopped.wait()
            gc.collect()
            assert kept() is None
            giver.go_on.set()
