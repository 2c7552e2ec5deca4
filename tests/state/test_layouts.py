"""The layout of a state, asked for by a keeper that has no model: only that of the run file's digest is believed."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import ProtocolViolation, Refused
from peerd.messages.encoding import Empty
from peerd.messages.state import StateItem, StateLayout, StateRequest, TensorSpec
from peerd.messages.swarm import Position
from peerd.rpc.rpc import Answer, Incoming, Rpc
from peerd.state.snapshot import SnapshotFetcher
from peerd.state.state_server import DECLARED, StateServer
from peerd.state.state_server import LAYOUT as LAYOUT_METHOD
from tests.state.test_snapshot import RUN, outline, peers
from tests.worlds.machines.workers import InlineWorker

LAYOUT = StateLayout(outline())
WANTED = (LAYOUT.digest, len(LAYOUT.text))
REQUEST = StateRequest(RUN, 1)


async def no_copy() -> tuple[Position, list[StateItem]]:
    raise AssertionError("a layout needs no copy of the state")


class Namer:
    """Gives the text, whatever its state is."""

    def __init__(self, rpc: Rpc, text: bytes) -> None:
        self._text = text
        rpc.serve(LAYOUT_METHOD, StateRequest, self._give, declared=DECLARED[LAYOUT_METHOD])

    async def _give(self, call: Incoming[StateRequest]) -> Answer[Empty]:
        await trio.lowlevel.checkpoint()
        return Answer(Empty(), (TensorFrame("uint8", (len(self._text),), self._text),))


async def test_a_donor_names_the_tensors_of_its_state(autojump_clock: MockClock) -> None:
    async def told() -> list[TensorSpec]:
        await trio.lowlevel.checkpoint()
        return outline()

    async with peers(2) as (_, [(giver, rpc), (_, keeper)]):
        giving = StateServer(rpc)
        with pytest.raises(Refused):
            await SnapshotFetcher(keeper).layout(giver, REQUEST, WANTED)
        giving.offer(RUN, 1, no_copy, InlineWorker(), lambda: Position(7, b"x"), no_step, told)
        assert await SnapshotFetcher(keeper).layout(giver, REQUEST, WANTED) == outline()
        with pytest.raises(ProtocolViolation, match="wrong digest"):
            await SnapshotFetcher(keeper).layout(giver, REQUEST, (bytes(32), len(LAYOUT.text)))
        with pytest.raises(Refused):
            await SnapshotFetcher(keeper).layout(giver, StateRequest(RUN, 2), WANTED)


async def no_step(step: int) -> None:
    raise AssertionError("nobody waits for a step")


@pytest.mark.parametrize("text", [b"", bytes(len(LAYOUT.text)), LAYOUT.text[:-1], LAYOUT.text + b"more"])
async def test_a_donor_that_gives_another_text_is_named(text: bytes, autojump_clock: MockClock) -> None:
    async with peers(2) as (_, [(giver, rpc), (_, keeper)]):
        Namer(rpc, text)
        with pytest.raises(ProtocolViolation) as caught:
            await SnapshotFetcher(keeper).layout(giver, REQUEST, WANTED)
        assert caught.value.peer == giver
